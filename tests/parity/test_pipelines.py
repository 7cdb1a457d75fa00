# SPDX-License-Identifier: Apache-2.0
"""Pipelines, by every schedule and with every other axis: the training of one device.

What a mesh is compared with knows nothing of Tessera: ``jax.grad`` of the plain model
and Optax on one device, for the same rows as one batch. How many targets count differs
from row to row, so microbatches weigh differently; the last rows are padding alone.

Most cases compare the gradients of one step. Those in which the optimizer's state is
sharded compare parameters after three steps of AdamW, whose epsilon is large enough for
a step to be a smooth function of the gradient.

Five layers on two stages are three and two, on four they are two, one, one and one.
Here are all meshes of ``pp`` with ``cp``; those with ``ep`` are in ``test_experts.py``,
the second stage of ZeRO is in ``test_zero.py``.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from tessera.graph.jit import function
from tessera.mesh import Mesh
from tessera.ops.loss_scale import LossScale
from tessera.tracing.scope import current_plan, set_plan
from tessera.train.config.optimizer_config import AdamWConfig
from tessera.train.config.step_config import StepConfig, batch_spec
from tessera.train.loop.optimizers import make_optimizer
from tessera.train.loop.pipelined_model import schedule_of
from tessera.train.loop.step import make_eval_step, make_train_step
from tessera.train.loop.train_state import init_state
from tessera.train.models import DecoderConfig, DecoderModel
from tessera.train.models.pipeline_stages import split_of
from tests.parity.plain_training import summed_loss, train_on_one_device

pytestmark = pytest.mark.full

STEPS, ROWS, LENGTH = 3, 24, 16
CONFIG = DecoderConfig(
    vocab_size=64,
    d_model=16,
    num_layers=5,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=32,
    window=8,
    query_pre_attn_scalar=8,
    global_every=3,
)
KEY, SEED = jax.random.key(0), jnp.float32(0.5)
ADAMW, RATE = make_optimizer(
    AdamWConfig(epsilon=1e-3, warmup_steps=1), steps=20, clip_norm=1.0
)


@cache
def batches() -> list[dict[str, np.ndarray]]:
    """Random tokens, ``[ROWS, LENGTH]``; ever fewer targets count, at last none."""
    draw = np.random.default_rng(0)
    shape, column = (ROWS, LENGTH), np.arange(LENGTH, dtype=np.int32)
    rare = np.minimum(np.arange(ROWS) / (ROWS - 6), 1.0)[:, None]
    segments = np.where(rare < 1, 1 + column // 10, 0).astype(np.int32)
    found = []
    for _ in range(STEPS):
        tokens = draw.integers(0, 64, (ROWS, LENGTH + 1), np.int32)
        ignored = draw.random(shape) < rare
        found.append(
            {
                "tokens": tokens[..., :-1],
                "targets": np.where(ignored, np.int32(-100), tokens[..., 1:]),
                "segment_ids": segments,
                "positions": np.broadcast_to(column % 10, shape),
            }
        )
    return found


def microbatched(batch: Mapping[str, np.ndarray], count: int) -> dict[str, np.ndarray]:
    return {name: array.reshape(count, -1, LENGTH) for name, array in batch.items()}


def numpy_tree(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


def step_config(
    shape: Mapping[str, int],
    schedule: str,
    *,
    chunks: int = 1,
    microbatches: int = 4,
    zero_stage: int = 0,
    dtype: str | None = None,
    gathers_once: bool = False,
    **options: Any,
) -> StepConfig:
    """The trainer's step of a model in stages, on as many devices as the mesh has."""
    devices = range(math.prod(shape.values()))
    mesh = Mesh(list(shape), devices=devices, shape=[*shape.values()])
    table = schedule_of(mesh, schedule, chunks, microbatches)
    assert table is not None
    return StepConfig(
        model=DecoderModel(
            CONFIG,
            split=split_of(mesh, CONFIG, chunks, table.placement),
            dtype=dtype,
            **options,
        ),
        optimizer=ADAMW,
        learning_rate=RATE,
        mesh=mesh,
        accumulation=microbatches,
        zero_stage=zero_stage,
        loss_chunk=6,
        schedule=table,
        gathers_once=gathers_once,
    )


def assert_close(tree: Any, want: Any, tolerance: float) -> None:
    """Compare trees of NumPy arrays, relative to the norm of each."""
    there = jax.tree_util.tree_leaves_with_path(want)
    apart = {
        jax.tree_util.keystr(path, simple=True, separator="/"): float(
            np.linalg.norm(got - x) / np.linalg.norm(x)
        )
        for (path, x), got in zip(there, jax.tree.leaves(tree), strict=True)
    }
    assert max(apart.values()) <= tolerance, apart


# --- the gradients of one step


@dataclasses.dataclass
class Reference:
    """A plain model's parameters, and its summed loss and gradients for one batch."""

    params: Any
    loss: float
    gradients: Any


@cache
def reference(config: DecoderConfig) -> Reference:
    model = DecoderModel(config)
    params = model.init(KEY)

    def loss(params: Any) -> jax.Array:
        return summed_loss(model, params, batches()[0])

    total, gradients = jax.jit(jax.value_and_grad(loss))(params)
    return Reference(numpy_tree(params), float(total), numpy_tree(gradients))


def gradients_of(config: StepConfig) -> tuple[Any, Any, Any]:
    """Stored parameters, sums and gradients of SEED times the loss, on the mesh."""
    layouts = jax.tree.map(
        lambda spec: NamedSharding(config.mesh.jax, spec), config.zero.params
    )
    plain = reference(config.model.config).params
    params = jax.device_put(numpy_tree(config.model.stored(plain)), layouts)
    micros = microbatched(batches()[0], config.accumulation)

    @function(mesh=config.mesh, in_specs={"micros": batch_spec(config)})
    def step(params: Any, micros: Any, seed: Any) -> Any:
        place = config.model.place(config.mesh)
        arranged = {name: place.arranged(array) for name, array in micros.items()}
        return config.pipeline.gradients(params, arranged, seed)

    return params, *step(params, micros, SEED)


CASES = {
    # Six microbatches are not a multiple of four stages.
    "four_stages": ({"pp": 4}, "zero_bubble", {"microbatches": 6}),
    "one_stage": ({"pp": 1}, "1f1b", {"microbatches": 2}),
    "chunks_of_parallel_sequences": (
        {"pp": 2, "fsdp": 2, "tp": 2},
        "interleaved",
        {"chunks": 2, "sequence_parallel": True},
    ),
    "dp_fsdp": (
        {"dp": 2, "pp": 2, "fsdp": 2},
        "zero_bubble",
        {"microbatches": 6, "remat": "full"},
    ),
    "gathered_once": (
        {"dp": 2, "pp": 2, "fsdp": 2},
        "1f1b",
        {"microbatches": 6, "remat": "named", "gathers_once": True},
    ),
    "v": (
        {"pp": 2, "fsdp": 2, "tp": 2},
        "dualpipev",
        {"chunks": 2, "remat": "named", "microbatches": 6},
    ),
    "v_gathered_once": (
        {"dp": 2, "pp": 2, "fsdp": 2},
        "dualpipev",
        {"chunks": 2, "microbatches": 6, "remat": "full", "gathers_once": True},
    ),
    "v_whose_stages_are_mixed": (
        {"pp": 2},
        "dualpipev",
        {"chunks": 2, "remat": ("none", "full", "none", "none", "none")},
    ),
    "ring": ({"pp": 2, "cp": 2}, "1f1b", {"remat": "named"}),
    "mixed": (
        {"pp": 2},
        "interleaved",
        # Stages of one layer and of two, whose second is rematerialized.
        {"chunks": 2, "remat": ("none", "full", "none", "none", "none")},
    ),
    "all_to_all": (
        {"pp": 2, "cp": 2, "tp": 2},
        "zero_bubble",
        {"context_parallel": "all_to_all"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_device(case):
    shape, schedule, options = CASES[case]
    config = step_config(shape, schedule, **options)
    want = reference(config.model.config)
    params, sums, gradients = gradients_of(config)

    np.testing.assert_allclose(sums["loss"], want.loss, rtol=1e-6)
    stored, own = params["decoder"], gradients["decoder"]
    for leaf, weight in zip(jax.tree.leaves(own), jax.tree.leaves(stored), strict=True):
        shards = leaf.sharding.shard_shape(leaf.shape)
        assert shards == weight.sharding.shard_shape(weight.shape)
    # What no layer reads has no gradient, and stays as it is.
    numbers = config.model.split.numbers
    padding = numbers >= config.model.config.num_layers
    assert padding.any() == (case != "one_stage")
    for leaf in jax.tree.leaves(own):
        assert not np.asarray(leaf)[padding].any()
    assert_close(
        config.model.plain(numpy_tree(gradients)),
        jax.tree.map(lambda gradient: 0.5 * gradient, want.gradients),
        5e-6,
    )
    if case in ("chunks_of_parallel_sequences", "gathered_once", "ring", "v"):
        sums, _ = make_eval_step(config)(params, batches()[0])
        np.testing.assert_allclose(sums["loss"], want.loss, rtol=1e-6)


# Of the other schedules "gathered_once" and "zero_stage_3_gathered_once" gather once.
SAME = {
    "interleaved": ({"pp": 2, "fsdp": 2, "cp": 2}, {"chunks": 2, "remat": "full"}),
    "zero_bubble": (
        {"pp": 2, "fsdp": 2, "tp": 2},
        {"sequence_parallel": True, "remat": "dots"},
    ),
}


@pytest.fixture
def strict_casts() -> Iterator[None]:
    """XLA rounds wherever the program does; by default it may leave out casts."""
    plan = current_plan()
    options = (("xla_allow_excess_precision", False),)
    set_plan(dataclasses.replace(plan, compiler_options=options))
    yield
    set_plan(plan)


@pytest.mark.usefixtures("strict_casts")
@pytest.mark.parametrize("schedule", SAME)
def test_gathering_once_rounds_nothing_more(schedule):
    """In bf16, whose rounding of one gradient would be a thousand times as large."""
    shape, options = SAME[schedule]
    results = []
    for once in (False, True):
        config = step_config(
            shape, schedule, dtype="bfloat16", gathers_once=once, **options
        )
        _, sums, gradients = gradients_of(config)
        assert {leaf.dtype.name for leaf in jax.tree.leaves(gradients)} == {"float32"}
        results.append((float(sums["loss"]), numpy_tree(gradients)))
    (loss, want), (loss_once, got) = results
    assert loss_once == pytest.approx(loss, rel=1e-6)
    assert_close(got, want, 2e-6)


# --- three steps of the trainer


@cache
def expected() -> tuple[list[float], Any]:
    """Losses and parameters of the plain model on one device, without Tessera."""
    losses, params = train_on_one_device(DecoderModel(CONFIG), ADAMW, KEY, batches())
    assert np.ptp(losses) > 0.01, "the losses have to move to be worth comparing"
    return losses, numpy_tree(params)


def train(config: StepConfig) -> tuple[list[float], Any, Any]:
    """Losses, plain parameters and stored parameters after the same steps."""
    scale = LossScale.dynamic() if config.model.dtype == "float16" else None
    state = init_state(
        config.model, ADAMW, KEY, config.mesh, zero_stage=config.zero_stage
    )
    state = dataclasses.replace(state, loss_scale=scale)
    step, losses = make_train_step(config, state), []
    layout = NamedSharding(config.mesh.jax, batch_spec(config))
    for batch in batches():
        micros = microbatched(batch, config.accumulation)
        state, metrics = step(state, jax.device_put(micros, layout))
        losses.append(float(metrics["loss"]))
    assert step.num_programs() == 1
    return losses, config.model.plain(numpy_tree(state.params)), state.params


TRAINED = {
    "zero_stage_1": ({"dp": 2, "pp": 2}, "gpipe", {"zero_stage": 1}),
    "zero_stage_3": (
        {"dp": 2, "tp": 2, "pp": 2},
        "zero_bubble",
        {"remat": "dots", "zero_stage": 3},
    ),
    "zero_stage_3_gathered_once": (
        {"dp": 2, "fsdp": 2, "pp": 2},
        "gpipe",
        {"microbatches": 6, "zero_stage": 3, "gathers_once": True},
    ),
}


@pytest.mark.parametrize("case", TRAINED)
def test_losses_and_parameters_are_those_of_one_device(case):
    shape, schedule, options = TRAINED[case]
    config = step_config(shape, schedule, **options)
    losses, params, stored = train(config)
    np.testing.assert_allclose(losses, expected()[0], rtol=2e-5, atol=0)
    assert_close(params, expected()[1], 2e-5)
    if case == "zero_stage_3":
        sums, _ = make_eval_step(config)(stored, batches()[0])
        want = jax.jit(partial(summed_loss, DecoderModel(CONFIG)))(
            expected()[1], batches()[0]
        )
        np.testing.assert_allclose(sums["loss"], want, rtol=2e-5)


def test_matmuls_in_half_precision_stay_near():
    losses, params, _ = train(step_config({"pp": 2}, "zero_bubble", dtype="float16"))
    np.testing.assert_allclose(losses, expected()[0], rtol=2e-3)
    assert losses != expected()[0]
    got, want = (
        np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])
        for tree in (params, expected()[1])
    )
    assert 0 < np.linalg.norm(got - want) < 1e-2 * np.linalg.norm(want)
