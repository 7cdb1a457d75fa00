# SPDX-License-Identifier: Apache-2.0
"""Finds the configuration files of Tessera, which are not Python modules."""

from pathlib import Path
from typing import Final

_PACKAGE: Final = Path(__file__).parents[1]


def configs_dir() -> Path:
    """The folder of ``config.yaml``: in the wheel in the package, else beside it."""
    installed = _PACKAGE / "configs"
    return installed if installed.is_dir() else _PACKAGE.parent / "configs"
