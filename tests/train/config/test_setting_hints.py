# SPDX-License-Identifier: Apache-2.0
"""The file of names that other trainers have for settings."""

import re

import pytest

from tessera.errors import UnknownSettingError
from tessera.train.config.command_line import read_flags
from tessera.train.config.help_text import setting_paths
from tessera.train.config.setting_hints import other_names

PATHS = {*setting_paths(), "hydra.run.dir", "name"}


def test_every_hint_names_settings_that_exist():
    for section in ("settings", "recipes"):
        for name, to in other_names(section).items():
            named = re.findall(r"([a-z][a-z_.]*)=", to)
            assert set(named) <= PATHS, name


def test_no_name_is_that_of_a_setting():
    own = {path.rpartition(".")[2] for path in PATHS}
    assert own.isdisjoint(other_names("settings"))


def test_settings_beside_a_flag_are_no_flags():
    with pytest.raises(UnknownSettingError) as caught:
        read_flags(["model=./model", "--lr", "1e-4", "recipe=lora"])
    assert caught.value.got == "--lr"
    assert caught.value.fix == (
        "settings have no dashes; for --lr: did you mean 'optimizer.learning_rate'?"
    )
