# SPDX-License-Identifier: Apache-2.0
"""The commands and settings of the guide ``train-on-many-devices.md``, as written."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from tessera.train.config.command_line import compose
from tests.documents import guide_pages

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/guides/train-on-many-devices.md").read_text()


@pytest.fixture(scope="module", autouse=True)
def first_configuration():
    """The first of a process imports Hydra and the model, for all tests."""
    compose([], ROOT / "configs")


def overrides():
    """What the page has after ``run_training.py``, and the settings in its comments."""
    for block in guide_pages.blocks(PAGE, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True) if "=" in line else []
            if "run_training.py" in words:
                yield words[words.index("run_training.py") + 1 :]
            elif words and words[0].startswith("model="):
                yield words


@pytest.mark.parametrize("words", list(overrides()), ids=" ".join)
def test_settings_on_a_command_line_are_taken(words):
    settings = compose(words, ROOT / "configs").config
    for word in words:
        name, value = word.split("=", 1)
        group, _, field = name.partition(".")
        if name == "model.mesh_shape":
            sizes, axes = settings.model.mesh_shape
            assert value.replace(
                '"', ""
            ) == f"[{list(sizes)},[{','.join(axes)}]]".replace(" ", "")
        elif field:
            found = getattr(getattr(settings, group), field)
            assert str(found).lower() == value
        else:
            assert getattr(settings, group).name == value


def sections():
    """The YAML of the page: settings of training, by name."""
    for block in guide_pages.blocks(PAGE, "yaml"):
        for part in re.findall(r"^ *training:\n(?: +\w+: .*\n?)+", block, re.M):
            settings = yaml.safe_load(part)["training"]
            yield from ((f"training.{name}", settings[name]) for name in settings)


@pytest.mark.parametrize(("name", "value"), list(sections()))
def test_settings_in_yaml_are_those_of_training(name, value):
    given = [f"{name}={value}"]
    if name.endswith("sync_gradients_every"):  # divides the microbatches above it
        given.append("training.gradient_accumulation_steps=4")
    training = compose(given, ROOT / "configs").config.training
    assert getattr(training, name.partition(".")[2]) == value
