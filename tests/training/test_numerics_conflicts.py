# SPDX-License-Identifier: Apache-2.0
"""Runs that cannot have deterministic numerics, and what they are told."""

from dataclasses import replace
from typing import Any

import pytest

from tessera.models.registry import config_of
from tessera.training.config import Config, ModelConfig, TrainingConfig
from tessera.training.optimizers import AdafactorConfig, AdamWConfig
from tessera.training.settings_checks import check


def settings(sizes: Any = (1,), axes: Any = ("dp",), **training: Any) -> Config:
    given = {"numerics": "deterministic", **training}
    return Config(
        name="test",
        model=ModelConfig(
            name="tiny", mesh_shape=(sizes, axes), config=config_of("tiny")
        ),
        training=TrainingConfig(**given),
    )


@pytest.mark.parametrize(
    ("sizes", "axes"),
    [
        ((1,), ("dp",)),
        ((8,), ("dp",)),
        ((2, 4), ("dp", "fsdp")),
        ((4, 1), ("dp", "tp")),
    ],
)
def test_data_axes_are_let_pass(sizes, axes):
    assert check(settings(sizes, axes)) == []


@pytest.mark.parametrize("axis", ["tp", "cp", "pp"])
def test_axes_inside_the_model_are_refused(axis):
    (error,) = check(settings((2, 2), ("dp", axis)))
    assert error.code == "T507"
    assert f"mesh axis '{axis}'" in str(error)


def test_groups_divide_the_microshards():
    (error,) = check(settings((3,), ("dp",)))
    assert str(error) == (
        "[T507] numerics cannot be deterministic in this run\n"
        "  got: training.numerics=deterministic; training.microshards=8 for 3 "
        "data-parallel groups: 8 / 3 leaves 2\n"
        "  fix: use as many groups as divide training.microshards, or "
        "training.numerics=fast\n"
        "  docs: docs/errors/T507.md"
    )


def test_microshards_divide_the_rows():
    (error,) = check(settings((2,), ("dp",), micro_batch_size=6))
    assert str(error) == (
        "[T503] a microbatch cannot be cut into its microshards\n"
        "  got: 12 rows, training.microshards=8: 12 / 8 leaves 4\n"
        "  fix: use training.micro_batch_size=8, or fewer microshards\n"
        "  docs: docs/errors/T503.md"
    )


def test_microshards_are_a_power_of_two():
    (error,) = check(settings(microshards=6))
    assert error.code == "T502"
    assert "training.microshards=4 or 8" in str(error)


def test_microshards_mean_nothing_with_fast_numerics():
    (error,) = check(settings(numerics="fast", microshards=4))
    assert error.code == "T502"


@pytest.mark.parametrize(
    "optimizer", [AdafactorConfig(), AdamWConfig(scale_learning_rate="sqrt")]
)
def test_optimizers_that_follow_the_mesh_are_refused(optimizer):
    (error,) = check(replace(settings(), optimizer=optimizer))
    assert error.code == "T507"


@pytest.mark.parametrize(
    "training",
    [
        {"gradient_compression": "int8"},
        {"loss_chunk": 6},
        {"sync_gradients_every": 2, "gradient_accumulation_steps": 2},
    ],
    ids=str,
)
def test_other_exchanges_of_gradients_are_refused(training):
    (error,) = check(settings(**training))
    assert error.code == "T507"
