# SPDX-License-Identifier: Apache-2.0
"""Command lines over the configuration files of this repository."""

from pathlib import Path

from tessera.training.command_line import compose

ROOT = Path(__file__).parents[2]
CONFIGS_DIR = ROOT / "configs"


def composed(*overrides):
    return compose(overrides, CONFIGS_DIR)
