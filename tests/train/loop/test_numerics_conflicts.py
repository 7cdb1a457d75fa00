# SPDX-License-Identifier: Apache-2.0
"""Runs that cannot have deterministic numerics, and what they are told."""

from dataclasses import replace
from typing import Any

import pytest

from tessera.train.config.optimizer_config import AdafactorConfig, AdamWConfig
from tessera.train.config.run_config import Config, ModelConfig, TrainingConfig
from tessera.train.config.settings_checks import check
from tessera.train.models.named_models import config_of


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
        ((3, 2), ("tp", "cp")),
        ((2, 4), ("dp", "fsdp")),
        ((4, 2), ("cp", "tp")),
        ((2, 2, 2), ("pp", "fsdp", "tp")),
    ],
)
def test_axes_of_any_kind_are_let_pass(sizes, axes):
    assert check(settings(sizes, axes)) == []


@pytest.mark.parametrize(
    ("axes", "model", "training"),
    [
        (("pp", "fsdp"), {}, {"pipeline_schedule": "gpipe"}),
        (("pp", "fsdp"), {}, {"pipeline_gather": "step"}),
        (("cp", "tp"), {"sequence_parallel": True}, {}),
        (("cp", "tp"), {"context_parallel": "all_to_all"}, {}),
    ],
)
def test_ways_to_compute_on_such_axes_are_refused(axes, model, training):
    given = settings((2, 2), axes, **training)
    (error,) = check(replace(given, model=replace(given.model, **model)))
    assert error.code == "T507"
    assert next(iter({**model, **training})) in str(error)
    assert "each device computes whole rows with all layers" in str(error)


def test_every_device_has_a_part():
    (error,) = check(settings((3, 3), ("dp", "tp")))
    assert str(error) == (
        "[T507] deterministic numerics need a part of the rows for each device\n"
        "  got: training.reduction_parts=8 for 9 devices\n"
        "  fix: use at most 8 devices, or more parts\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T507.html"
    )


def test_reduction_parts_divide_the_rows():
    (error,) = check(settings((2,), ("dp",), micro_batch_size=6))
    assert str(error) == (
        "[T503] a step cannot be cut into its parts\n"
        "  got: 12 rows, training.reduction_parts=8: 12 / 8 leaves 4\n"
        "  fix: use a batch of 8 or 16 rows, or fewer parts\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T503.html"
    )


@pytest.mark.parametrize(
    "training",
    [
        {"micro_batch_size": 2, "gradient_accumulation_steps": 16},
        {"micro_batch_size": 2, "global_batch_size": 64},
    ],
)
def test_a_part_is_no_larger_than_a_microbatch_of_one_device(training):
    (error,) = check(settings((2,), ("dp",), **training))
    assert str(error) == (
        "[T503] a part of the rows is larger than a microbatch of one device\n"
        "  got: 64 rows in training.reduction_parts=8: 8 each, "
        "training.micro_batch_size=2\n"
        "  fix: use training.reduction_parts=32 or training.micro_batch_size=8\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T503.html"
    )


def test_reduction_parts_are_a_power_of_two():
    (error,) = check(settings(reduction_parts=6))
    assert error.code == "T502"
    assert "use a power of 2 from 1 to " in str(error)


def test_reduction_parts_mean_nothing_with_fast_numerics():
    (error,) = check(settings(numerics="fast", reduction_parts=4))
    assert error.code == "T507"


@pytest.mark.parametrize(
    "optimizer", [AdafactorConfig(), AdamWConfig(scale_learning_rate="sqrt")]
)
def test_optimizers_that_follow_the_mesh_are_refused(optimizer):
    (error,) = check(replace(settings(), optimizer=optimizer))
    assert error.code == "T507"


@pytest.mark.parametrize(
    "training",
    [
        {"loss_chunk": 6},
        {"sync_gradients_every": 2, "gradient_accumulation_steps": 2},
    ],
    ids=str,
)
def test_other_exchanges_of_gradients_are_refused(training):
    (error,) = check(settings(**training))
    assert error.code == "T507"
