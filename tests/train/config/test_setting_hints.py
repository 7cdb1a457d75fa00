# SPDX-License-Identifier: Apache-2.0
"""The file of names that other trainers have for settings."""

import re

import pytest

from tessera.errors import UnknownSettingError
from tessera.train.config.command_line import read_flags
from tessera.train.config.help_text import setting_paths
from tessera.train.config.setting_hints import no_setting, other_names

PATHS = {*setting_paths(), "hydra.run.dir", "name", "rewards"}


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


def test_a_name_of_trl_is_that_of_its_group():
    def fix(key):
        return no_setting(key, 1, [], sorted(PATHS), "").fix

    assert fix("grpo.beta") == "write grpo.kl_coefficient=<weight>"
    assert fix("training.beta") == "did you mean 'preference.beta'?"
    assert fix("num_generations").startswith("write grpo.group_size=")
