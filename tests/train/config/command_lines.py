# SPDX-License-Identifier: Apache-2.0
"""Command lines over the configuration files of this repository."""

from collections.abc import Callable, Sequence
from pathlib import Path

from tessera.train.config.command_line import (
    Composed,
    compose,
    read_command_line,
)
from tessera.train.runtime.exit_codes import shows_errors

ROOT = Path(__file__).parents[3]
CONFIGS_DIR = ROOT / "configs"


def composed(*overrides):
    return compose(overrides, CONFIGS_DIR)


def run_from_command_line(
    run: Callable[[Composed], None], arguments: Sequence[str]
) -> int:
    """The exit code of a program that is called with what a command line asks for."""
    found = read_command_line(CONFIGS_DIR, arguments)
    if isinstance(found, int):
        return found
    return shows_errors(lambda: run(found) or 0)()
