# SPDX-License-Identifier: Apache-2.0
"""Settings that exclude each other."""

import re

import pytest

from tessera.errors import TesseraError
from tessera.train.config.setting_conflicts import EXCLUDED, OF_AXES, UNREAD
from tessera.train.config.setting_fields import Conflict
from tests.fuzz.override_lists import SETTINGS
from tests.train.config.command_lines import composed

NARROW = "training.mixed_precision={computation: bf16, reduction: bf16}"


@pytest.mark.parametrize(
    ("given", "setting"),
    [
        (
            (
                "model.mesh_shape=[[2],[pp]]",
                "training.gradient_accumulation_steps=2",
            ),
            "training.mixed_precision",
        ),
        (("training.numerics=deterministic",), "training.numerics"),
        (
            (
                "training.gradient_accumulation_steps=2",
                "training.sync_gradients_every=2",
            ),
            "training.sync_gradients_every",
        ),
    ],
)
def test_gradients_that_something_else_adds_up_are_not_reduced_in_bf16(given, setting):
    with pytest.raises(TesseraError) as caught:
        composed(NARROW, *given)
    assert caught.value.code == "T507"
    assert caught.value.what == f"{setting} cannot be used in this run"
    assert "in f32" in caught.value.got


def test_alone_it_is_taken():
    assert composed(NARROW, "model.mesh_shape=[[2],[fsdp]]")


def test_the_table_names_settings_that_exist():
    """One that does not would never hold."""
    conditions = [
        condition
        for rule in (
            *EXCLUDED,
            *UNREAD,
            *(Conflict("", names) for names in OF_AXES.values()),
        )
        for condition in f"{rule.when} {rule.settings}".split()
    ]
    names = {re.split("!?=", condition)[0] for condition in conditions}
    assert names <= {name for name, _ in SETTINGS}
