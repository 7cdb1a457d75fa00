# SPDX-License-Identifier: Apache-2.0
"""A global batch has as many sequences on every mesh."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.errors import BatchSizeError, TesseraError
from tessera.foundations.config_files import configs_dir
from tessera.mesh import Mesh
from tessera.train.config.batch_sizes import with_batch_sizes
from tessera.train.config.command_line import compose
from tessera.train.config.run_config import Config, ModelConfig, TrainingConfig
from tessera.train.loop.build_run import Run


def config_of(**training):
    return Config("run", ModelConfig(name="m", config=None), TrainingConfig(**training))


@given(
    share=st.integers(1, 60),
    groups=st.sampled_from([1, 2, 3, 8]),
    most=st.integers(1, 64),
)
def test_groups_microbatches_and_sequences_make_the_batch(share, groups, most):
    asked = config_of(global_batch_size=share * groups, micro_batch_size=most)
    training = with_batch_sizes(asked, {"fsdp": groups, "tp": 2}).training
    micro, count = training.micro_batch_size, training.gradient_accumulation_steps
    assert micro * count * groups == share * groups
    assert micro <= most
    # No larger microbatch would do.
    assert not any(share % size == 0 for size in range(micro + 1, min(share, most) + 1))


def test_without_a_global_batch_nothing_changes():
    config = config_of(micro_batch_size=3, gradient_accumulation_steps=5)
    assert with_batch_sizes(config, {"dp": 4}) is config


def test_a_batch_that_the_groups_cannot_share_is_refused():
    with pytest.raises(BatchSizeError, match="10 / 4 groups leaves 2") as error:
        with_batch_sizes(config_of(global_batch_size=10), {"dp": 2, "fsdp": 2})
    assert "training.global_batch_size=8" in str(error.value)


def test_a_run_has_as_many_rows_on_every_mesh():
    settings = compose(["training.global_batch_size=24"], configs_dir()).config
    for sizes in ((1, 1), (4, 1), (2, 2)):
        count = sizes[0] * sizes[1]
        run = Run(settings, Mesh(["fsdp", "tp"], devices=range(count), shape=sizes))
        steps, rows, _ = run.abstract_batch["tokens"].shape
        assert steps * rows == 24 == run.rows_per_step


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["24", "model.mesh_shape=[[5],[dp]]"], "T503"),
        (["24", "training.gradient_accumulation_steps=2"], "T507"),
        (["0"], "T502"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_run(words, code):
    size, *others = words
    with pytest.raises(TesseraError, match=code):
        compose([f"training.global_batch_size={size}", *others], configs_dir())


def test_microbatches_of_a_pipeline_follow_from_the_batch():
    settings = compose(
        ["training.global_batch_size=32", "model.mesh_shape=[[2,2],[dp,pp]]"],
        configs_dir(),
    ).config
    training = dataclasses.replace(settings.training, micro_batch_size=4)
    settings = dataclasses.replace(settings, training=training)
    run = Run(settings, Mesh(["dp", "pp"], devices=range(4), shape=(2, 2)))
    assert run.schedule.microbatches == 4
