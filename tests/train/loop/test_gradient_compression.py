# SPDX-License-Identifier: Apache-2.0
"""Compressed gradients in the trainer's step: what they are, send, and keep."""

import dataclasses
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tessera.mesh import Mesh
from tessera.ops.loss_scale import LossScale
from tessera.train.loop.optimizers import AdamWConfig, make_optimizer
from tessera.train.loop.step import StepConfig, batch_spec, make_train_step
from tessera.train.loop.train_state import TrainState, init_state
from tessera.train.models import DecoderModel
from tests.small_model import SMALL

CONFIG = dataclasses.replace(SMALL, num_layers=1)
ADAMW, RATE = make_optimizer(AdamWConfig(epsilon=1e-3), steps=20)
DP = Mesh(["dp"], devices=range(4))
CUBE = Mesh(["dp", "fsdp", "tp"], devices=range(8), shape=(2, 2, 2))
MICROBATCHES, ROWS, LENGTH = 2, 8, 16


def make_batch(seed: int = 0) -> dict[str, Any]:
    """Two microbatches of which different shares of the targets do not count."""
    draw = np.random.default_rng(seed)
    shape = (MICROBATCHES, ROWS, LENGTH)
    tokens = draw.integers(0, 64, (*shape[:2], LENGTH + 1), np.int32)
    hidden = draw.random(shape) < np.linspace(0, 0.7, ROWS)[:, None]
    return {
        "tokens": tokens[..., :-1],
        "targets": np.where(hidden, np.int32(-100), tokens[..., 1:]),
        "segment_ids": np.ones(shape, np.int32),
        "positions": np.broadcast_to(np.arange(LENGTH, dtype=np.int32), shape),
    }


@dataclasses.dataclass
class Ran:
    """A compiled step, the state it began with and what its first call gave."""

    config: StepConfig
    step: Any
    state: TrainState
    metrics: dict[str, jax.Array]

    @property
    def gradients(self) -> Any:
        return self.state.optimizer[0].trace

    def again(self, seed: int) -> "Ran":
        state = jax.tree.map(jnp.copy, self.state)
        state, metrics = self.step(state, put(self.config, make_batch(seed)))
        return dataclasses.replace(self, state=state, metrics=metrics)


def put(config: StepConfig, batch: Any) -> Any:
    return jax.device_put(batch, NamedSharding(config.mesh.jax, batch_spec(config)))


@cache
def run(mesh: Mesh, **options: Any) -> Ran:
    config = StepConfig(
        model=DecoderModel(CONFIG, dtype=options.pop("dtype", None)),
        # A trace without decay holds the gradients of the last step.
        optimizer=optax.chain(optax.trace(decay=0.0), ADAMW),
        learning_rate=RATE,
        mesh=mesh,
        accumulation=MICROBATCHES,
        **options,
    )
    state = init_state(
        config.model,
        config.optimizer,
        jax.random.key(0),
        mesh,
        loss_scale=LossScale.dynamic() if config.model.dtype == "float16" else None,
        zero_stage=config.zero_stage,
    )
    state = dataclasses.replace(state, residual=config.exchange.first_residual())
    step = make_train_step(config, state)
    state, metrics = step(state, put(config, make_batch()))
    return Ran(config, step, state, metrics)


def distances(got: Any, want: Any) -> list[float]:
    """How far each leaf is from another tree's, as a share of its largest value."""
    return [
        float(np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(b).max())
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    ]


TOP = {"compression": "top_k", "compression_ratio": 0.1}
# Together with an optimizer state that is split over dp.
SPLIT = {"compression": "int8", "zero_stage": 1}
EVERYTHING = {"compression": "top_k", "compression_ratio": 1.0}
FULL = pytest.mark.full


@pytest.mark.full
@pytest.mark.parametrize(
    ("mesh", "options", "error"),
    [
        pytest.param(DP, {"compression": "bf16"}, 2**-7, id="bf16", marks=FULL),
        pytest.param(DP, {"compression": "int8"}, 3 / 254, id="int8"),
        pytest.param(CUBE, SPLIT, 3 / 254, id="int8_cube", marks=FULL),
        pytest.param(CUBE, EVERYTHING, 1e-6, id="top_k_cube", marks=FULL),
    ],
)
def test_compressed_gradients_are_about_the_gradients(mesh, options, error):
    plain, ran = run(DP), run(mesh, **options)
    np.testing.assert_allclose(ran.metrics["loss"], plain.metrics["loss"], rtol=1e-6)
    apart = distances(ran.gradients, plain.gradients)
    # A device's largest value may be larger than the mean's.
    assert max(apart) < 4 * error
    assert options is EVERYTHING or max(apart) > 1e-4, "it is compressed"


@pytest.mark.parametrize(
    ("mesh", "options", "dtypes"),
    [
        pytest.param(DP, {"compression": "bf16"}, {"u16"}, id="bf16", marks=FULL),
        pytest.param(CUBE, SPLIT, {"s8", "f32"}, id="int8", marks=FULL),
        pytest.param(CUBE, EVERYTHING, {"s32", "f32"}, id="top_k", marks=FULL),
    ],
)
def test_over_dp_only_the_compressed_gradients_are_sent(mesh, options, dtypes):
    found = set()
    for row in run(mesh, **options).step.last.collectives.rows:
        # Smaller ones are counts of tokens; new parameters are gathered in f32.
        is_weight = row.kind == "all-gather" and options is SPLIT
        is_weight &= row.arrays[0].dtype == "f32"
        if "dp" in row.axes and row.nbytes > 64 and not is_weight:
            assert row.axes == ("dp",)
            assert row.kind in ("all-to-all", "all-gather")
            assert row.calls == 1
            found |= {array.dtype for array in row.arrays}
    assert found == dtypes


@pytest.mark.full
def test_int8_sends_a_quarter_of_the_bytes():
    """Two exchanges of a byte, where an all-reduce is two exchanges of four."""
    values = sum(leaf.size for leaf in jax.tree.leaves(DecoderModel(CONFIG).abstract()))
    rows = run(DP, compression="int8").step.last.collectives.rows
    exchanges = [row for row in rows if row.kind != "all-reduce"]
    assert len(exchanges) == 4
    sent = sum(row.total_bytes for row in exchanges)
    # Scales are 4 bytes for 128 values, where parameters are as small as here.
    assert 2 * values < sent < 2.2 * values


@pytest.mark.full
def test_without_compression_nothing_is_kept_and_the_program_is_the_same():
    ran = run(DP)
    assert ran.state.residual is None
    assert run(DP, compression="int8").state.residual is None
    kinds = {row.kind for row in ran.step.last.collectives.rows}
    assert kinds == {"all-reduce"}


@pytest.mark.full
def test_what_top_k_keeps_lies_on_the_device_that_keeps_it():
    ran = run(CUBE, **EVERYTHING)
    specs = ran.config.model.layouts(CUBE)
    for kept, leaf, spec in zip(
        jax.tree.leaves(ran.state.residual),
        jax.tree.leaves(ran.state.params),
        jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P)),
        strict=True,
    ):
        assert kept.shape == (2, *leaf.shape)
        assert kept.sharding.is_equivalent_to(
            NamedSharding(CUBE.jax, P("dp", *spec)), kept.ndim
        )


@pytest.mark.full
def test_top_k_loses_nothing_over_several_steps():
    """The plain gradients of the same weights are what was sent and what is kept."""
    ran, plain = run(DP, **TOP), run(DP)
    kept = jax.tree.map(lambda r: np.asarray(r).sum(axis=0), ran.state.residual)
    total = jax.tree.map(np.add, jax.tree.map(np.asarray, ran.gradients), kept)
    assert max(distances(total, plain.gradients)) < 1e-5
    assert max(distances(ran.gradients, plain.gradients)) > 1e-2
    # What the second step sends and keeps is more by what the first one kept.
    before = jax.tree.map(np.asarray, ran.state.residual)
    after = ran.again(seed=1)
    own = dataclasses.replace(ran.state, residual=jax.tree.map(np.zeros_like, before))
    fresh = dataclasses.replace(ran, state=own).again(seed=1)
    for kept, new, fed, alone in zip(
        jax.tree.leaves(before),
        jax.tree.leaves(jax.tree.map(np.asarray, after.state.residual)),
        zip(
            jax.tree.leaves(after.gradients),
            jax.tree.leaves(fresh.gradients),
            strict=True,
        ),
        jax.tree.leaves(jax.tree.map(np.asarray, fresh.state.residual)),
        strict=True,
    ):
        carried = np.asarray(fed[0]) + new.sum(axis=0)
        expected = np.asarray(fed[1]) + alone.sum(axis=0) + kept.sum(axis=0)
        np.testing.assert_allclose(
            carried, expected, atol=1e-6 * np.abs(expected).max(), rtol=1e-5
        )


@pytest.mark.full
@pytest.mark.parametrize(
    "options", [{"compression": "int8"}, TOP], ids=["int8", "top_k"]
)
def test_a_compressed_run_learns(options):
    ran = run(DP, **options)
    first = float(ran.metrics["loss"])
    for _ in range(12):
        ran = ran.again(seed=0)
    assert float(ran.metrics["loss"]) < first - 0.1


@pytest.mark.full
def test_an_overflow_keeps_what_was_kept_back():
    ran = run(DP, **TOP, dtype="float16")
    before = dataclasses.replace(ran.state, loss_scale=LossScale.dynamic(2.0**24))
    after = dataclasses.replace(ran, state=before).again(seed=0)
    assert float(after.metrics["overflow"]) == 1.0
    for old, new in zip(
        jax.tree.leaves((before.params, before.residual)),
        jax.tree.leaves((after.state.params, after.state.residual)),
        strict=True,
    ):
        np.testing.assert_array_equal(old, new)
