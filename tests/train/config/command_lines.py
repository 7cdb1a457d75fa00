# SPDX-License-Identifier: Apache-2.0
"""Command lines over the configuration files of this repository."""

from collections.abc import Callable, Sequence
from pathlib import Path

from tessera.train.config.command_line import (
    Composed,
    compose,
    read_command_line,
    run_composed,
)

ROOT = Path(__file__).parents[3]
CONFIGS_DIR = ROOT / "configs"


def composed(*overrides):
    return compose(overrides, CONFIGS_DIR)


def run_from_command_line(
    run: Callable[[Composed], None], arguments: Sequence[str]
) -> int:
    """The exit code of a program that is called with what a command line asks for."""
    found = read_command_line(CONFIGS_DIR, arguments)
    return found if isinstance(found, int) else run_composed(run, found)
