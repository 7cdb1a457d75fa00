# SPDX-License-Identifier: Apache-2.0
"""``training.trainable`` and ``training.frozen``: what is frozen keeps its bits.

The trained parameters take the step that they take beside trained ones.
"""

import dataclasses
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

from tessera.errors import SettingValueError
from tessera.foundations.tree import named_leaves
from tessera.train.config.mesh_shape import mesh_of_shape
from tessera.train.config.optimizer_config import SgdConfig
from tessera.train.config.run_config import Config, ModelConfig, TrainingConfig
from tessera.train.data.data_config import DataConfig, SyntheticConfig
from tessera.train.loop.build_run import Run
from tessera.train.loop.run_summary import run_rows
from tessera.train.loop.train_state import init_state
from tests.small_model import SMALL

TRAINABLE = ["*norm*/scale", "decoder/mlp/*"]
DATA = DataConfig(name="synthetic", synthetic=SyntheticConfig(tokens=4000))
# Each way in which a step makes its gradients.
WAYS: dict[str, Any] = {
    "one device": {"mesh": ((1,), ("fsdp",))},
    "fsdp x tp": {"mesh": ((2, 2), ("fsdp", "tp"))},
    "ZeRO 3, accumulated": {
        "mesh": ((4,), ("dp",)),
        "zero_stage": 3,
        "gradient_accumulation_steps": 2,
        "micro_batch_size": 1,
    },
    "seldom reduced": {
        "mesh": ((2,), ("dp",)),
        "gradient_accumulation_steps": 2,
        "micro_batch_size": 2,
        "sync_gradients_every": 2,
    },
    "deterministic": {
        "mesh": ((2,), ("dp",)),
        "numerics": "deterministic",
        "reduction_parts": 4,
    },
    "pipeline": {
        "mesh": ((2,), ("pp",)),
        "gradient_accumulation_steps": 2,
        "micro_batch_size": 4,
    },
}


def run_of(*, mesh, **training):
    rows = 8 // np.prod([s for s, a in zip(*mesh, strict=True) if a in ("dp", "fsdp")])
    training = {"micro_batch_size": int(rows), "sequence_length": 16} | training
    settings = Config(
        name="frozen",
        model=ModelConfig(name="small", mesh_shape=mesh, config=SMALL),
        training=TrainingConfig(clip_norm=None, loss_chunk="none", **training),
        data=DATA,
        optimizer=SgdConfig(learning_rate=0.1, warmup_steps=0, momentum=0.9),
    )
    return Run(settings, mesh_of_shape(mesh))


def stepped(run):
    """The parameters before and after one step, without stages, by name."""
    config, accumulation = run.step_config, run.config.training
    state = init_state(
        run.model,
        config.optimizer,
        jax.random.key(0),
        run.mesh,
        zero_stage=config.zero_stage,
    )
    before = named_leaves(jax.tree.map(np.asarray, run.model.plain(state.params)))
    tokens = np.random.default_rng(0).integers(0, 64, (8, 17), np.int32)
    batch = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segment_ids": np.ones((8, 16), np.int32),
        "positions": np.broadcast_to(np.arange(16, dtype=np.int32), (8, 16)),
    }
    steps = accumulation.gradient_accumulation_steps
    batch = {name: x.reshape(steps, -1, 16) for name, x in batch.items()}
    state, _ = run.step(state, batch)
    return before, named_leaves(jax.tree.map(np.asarray, run.model.plain(state.params)))


@cache
def all_trained():
    return stepped(run_of(**WAYS["one device"]))[1]


def cases():
    """All ways; `make test` takes the first."""
    for number, way in enumerate(WAYS):
        yield pytest.param(way, marks=pytest.mark.full if number else ())


@pytest.mark.full
@pytest.mark.parametrize("way", [*cases()])
def test_what_is_frozen_keeps_its_bits_and_the_rest_learns_as_before(way):
    run = run_of(**WAYS[way], trainable=TRAINABLE)
    before, after = stepped(run)
    assert run.model.frozen == {
        "embedding",
        *(f"decoder/attention/{n}/kernel" for n in ("query", "key", "value", "output")),
    }
    for name, values in after.items():
        if name in run.model.frozen:
            np.testing.assert_array_equal(values, before[name], name)
        else:
            np.testing.assert_allclose(
                values, all_trained()[name], rtol=1e-5, atol=1e-6, err_msg=name
            )
            assert (values != before[name]).any(), name


def test_the_optimizer_keeps_nothing_for_what_is_frozen():
    run = run_of(**WAYS["fsdp x tp"], trainable=TRAINABLE)
    names = {
        name.partition("trace/")[2]
        for name, leaf in named_leaves(run.abstract_state.optimizer).items()
        if leaf.shape
    }
    trained = named_leaves(run.model.abstract()).keys() - run.model.frozen
    assert names == trained
    assert jax.tree.structure(run.step_config.zero.gradients) == jax.tree.structure(
        run.model.trained(run.model.abstract())
    )


@pytest.mark.full
def test_frozen_weights_have_no_gradient_matmuls():
    """Their gradients are not computed: the step is cheaper by about a matmul each."""
    whole, part = (
        run_of(**WAYS["one device"], trainable=patterns)
        for patterns in (None, ["embedding"])
    )
    assert part.flops < 0.85 * whole.flops


def test_frozen_patterns_exclude_from_the_trainable_ones():
    run = run_of(**WAYS["one device"], frozen=["decoder/*"])
    assert run.model.frozen == {
        name
        for name in named_leaves(run.model.abstract())
        if name.startswith("decoder")
    }
    both = run_of(**WAYS["one device"], trainable=["*kernel"], frozen=["*mlp*"])
    trained = named_leaves(both.model.abstract()).keys() - both.model.frozen
    assert {name.split("/")[1] for name in trained} == {"attention"}


def test_the_table_of_the_run_counts_what_is_trained():
    run = run_of(**WAYS["one device"], trainable=["final_norm/*"])
    rows = dict(run_rows(run))
    assert rows["parameters"].endswith(", 32 of them trained")


def test_a_model_without_frozen_parameters_is_the_same_program():
    config = run_of(**WAYS["one device"])
    assert config.model.frozen == frozenset()
    assert config.model.trained(tree := {"a": 1}) is tree


@pytest.mark.parametrize(
    ("settings", "got"),
    [
        ({"trainable": ["*nrom*"]}, r"'\*nrom\*'"),
        ({"frozen": ["decoder/mlp"]}, "'decoder/mlp'"),
        ({"frozen": ["*"]}, "no parameter is left"),
        ({"trainable": []}, "no parameter is left"),
    ],
)
def test_patterns_that_say_nothing_are_refused(settings, got):
    with pytest.raises(SettingValueError, match=got):
        _ = run_of(**WAYS["one device"], **settings).model


def test_a_single_text_is_no_list():
    from tests.train.config.command_lines import composed

    with pytest.raises(SettingValueError, match=r"training\.trainable"):
        composed("training.trainable=embedding")
    given = composed("training.trainable=[embedding]").config
    assert dataclasses.replace(given.training).trainable == ["embedding"]
