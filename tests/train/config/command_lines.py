# SPDX-License-Identifier: Apache-2.0
"""Command lines over the configuration files of this repository."""

from pathlib import Path

from tessera.train.config.command_line import compose

ROOT = Path(__file__).parents[3]
CONFIGS_DIR = ROOT / "configs"


def composed(*overrides):
    return compose(overrides, CONFIGS_DIR)
