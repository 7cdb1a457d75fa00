# SPDX-License-Identifier: Apache-2.0
"""Pipelines, by every schedule and with every other axis: the training of one device.

What a mesh is compared with knows nothing of Tessera: ``jax.grad`` of the plain model
and Optax on one device, for the same rows as one batch. Parameters are compared after
three steps of AdamW, whose epsilon is large enough for a step to be a smooth function
of the gradient. How many targets count differs from row to row, so microbatches weigh
differently; the last rows are padding alone.
"""

import dataclasses
import math
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from tessera.mesh import Mesh
from tessera.models import Gemma3Config, Model
from tessera.ops.loss_scale import LossScale
from tessera.training.optimizers import AdamWConfig, make_optimizer
from tessera.training.pipelined_model import schedule_of, split_of
from tessera.training.step import (
    StepConfig,
    batch_spec,
    make_eval_step,
    make_train_step,
)
from tessera.training.train_state import init_state
from tests.parity.plain_training import summed_loss, train_on_one_device

STEPS, ROWS, LENGTH = 3, 24, 16
CONFIG = Gemma3Config(
    vocab_size=64,
    d_model=16,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=32,
    window=8,
    query_pre_attn_scalar=8,
    global_every=3,
)
KEY = jax.random.key(0)
ADAMW, RATE = make_optimizer(
    AdamWConfig(epsilon=1e-3, warmup_steps=1), steps=20, clip_norm=1.0
)


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


@dataclasses.dataclass
class Run:
    """Losses of all steps, the loss of a validation, and the parameters at the end."""

    losses: list[float]
    validation: float
    params: Any
    compiled: Any = None


@cache
def expected(**sizes: Any) -> Run:
    """The steps of the plain model on one device, without Tessera."""
    model = Model(dataclasses.replace(CONFIG, **sizes))

    losses, params = train_on_one_device(model, ADAMW, KEY, batches())
    return Run(losses, float(summed_loss(model, params, batches()[0])), params)


def train(
    shape: dict[str, int],
    schedule: str,
    *,
    chunks: int = 1,
    microbatches: int = 4,
    zero_stage: int = 0,
    dtype: str = "f32",
    sizes: dict[str, int] | None = None,
    **options: Any,
) -> Run:
    """The same steps by Tessera on a mesh."""
    devices = range(math.prod(shape.values()))
    mesh = Mesh(list(shape), devices=devices, shape=[*shape.values()])
    config = dataclasses.replace(CONFIG, **(sizes or {}))
    model = Model(config, split=split_of(mesh, config, chunks), **options)
    config = StepConfig(
        model=model,
        optimizer=ADAMW,
        learning_rate=RATE,
        mesh=mesh,
        accumulation=microbatches,
        zero_stage=zero_stage,
        dtype=dtype,
        loss_chunk=6,
        schedule=schedule_of(mesh, schedule, chunks, microbatches),
    )
    scale = LossScale.dynamic() if dtype == "f16" else None
    state = init_state(model, ADAMW, KEY, mesh, zero_stage=zero_stage, loss_scale=scale)
    step, losses = make_train_step(config, state), []
    place = NamedSharding(mesh.jax, batch_spec(config))
    for batch in batches():
        micros = {
            name: array.reshape(microbatches, -1, LENGTH)
            for name, array in batch.items()
        }
        state, metrics = step(state, jax.device_put(micros, place))
        losses.append(float(metrics["loss"]))
    assert step.num_programs() == 1
    validation, _ = make_eval_step(config)(state.params, batches()[0])
    params = model.plain(jax.tree.map(np.asarray, state.params))
    return Run(losses, float(validation), params, step.last)


def check(run: Run, want: Run) -> None:
    """Hold every number to 2e-5, and the program to permutes that all devices do."""
    np.testing.assert_allclose(run.losses, want.losses, rtol=2e-5, atol=0)
    np.testing.assert_allclose(run.validation, want.validation, rtol=2e-5)
    assert np.ptp(want.losses) > 0.01, "the losses have to move to be worth comparing"
    apart = differences(run, want)
    assert max(apart.values()) <= 2e-5, apart
    # A permute in a branch that only some stages take would wait for ever.
    permutes = [
        row for row in run.compiled.collectives.rows if row.kind == "collective-permute"
    ]
    assert not [row for row in permutes if row.conditional]


def differences(run: Run, want: Run) -> dict[str, float]:
    """How far apart parameters are, relative to their norms."""
    there = jax.tree_util.tree_leaves_with_path(want.params)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): float(
            np.linalg.norm(got - x) / np.linalg.norm(x)
        )
        for (path, x), got in zip(there, jax.tree.leaves(run.params), strict=True)
    }


ALL, CUBE = {"pp": 4}, {"pp": 2, "fsdp": 2, "tp": 2}


@pytest.mark.full
@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1)],
)
def test_every_schedule_learns_what_one_device_learns(schedule, chunks):
    check(train(CUBE, schedule, chunks=chunks), expected())


CASES = {
    # Two stages of five layers are three and two, four are two, one, one and one.
    # Six microbatches are not a multiple of four stages.
    "four_stages_uneven": (
        ALL,
        "1f1b",
        {"sizes": {"num_layers": 5}, "microbatches": 6},
    ),
    "four_stages_of_uneven_chunks": (
        ALL,
        "interleaved",
        {"sizes": {"num_layers": 9}, "chunks": 2, "microbatches": 8},
    ),
    "four_stages_split_backward": (ALL, "zero_bubble", {"sizes": {"num_layers": 5}}),
    "fewer_microbatches_than_stages": (ALL, "1f1b", {"microbatches": 2}),
    "one_microbatch": ({"pp": 2}, "zero_bubble", {"microbatches": 1}),
    "one_stage": ({"pp": 1}, "zero_bubble", {}),
    "dp_tp_pp": (
        {"dp": 2, "tp": 2, "pp": 2},
        "1f1b",
        {"remat": "dots", "zero_stage": 2},
    ),
    "dp_pp_fsdp": (
        {"dp": 2, "pp": 2, "fsdp": 2},
        "zero_bubble",
        {"microbatches": 6, "remat": "full"},
    ),
    "sequence_parallel": (
        CUBE,
        "zero_bubble",
        {"sizes": {"num_layers": 5}, "sequence_parallel": True},
    ),
    "ring": ({"pp": 2, "cp": 2}, "1f1b", {}),
    "all_to_all": (
        {"pp": 2, "cp": 2, "tp": 2},
        "zero_bubble",
        {"sizes": {"num_layers": 5}, "context_parallel": "all_to_all"},
    ),
    "zero_stage_1": ({"dp": 2, "pp": 2}, "gpipe", {"zero_stage": 1}),
    "zero_stage_3": ({"pp": 2, "dp": 2}, "zero_bubble", {"zero_stage": 3}),
    "experts": (
        {"pp": 2, "ep": 2},
        "zero_bubble",
        {
            "sizes": {
                "num_layers": 5,
                "num_experts": 4,
                "experts_per_token": 2,
                # What they train differs with the size of microbatches.
                "router_balance_weight": 0.0,
                "router_z_weight": 0.0,
            }
        },
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_losses_and_parameters_are_those_of_one_device(case):
    shape, schedule, options = CASES[case]
    check(train(shape, schedule, **options), expected(**options.get("sizes", {})))


@pytest.mark.full
@pytest.mark.parametrize(
    ("dtype", "schedule"), [("bf16", "1f1b"), ("f16", "zero_bubble")]
)
def test_matmuls_in_half_precision_stay_near(dtype, schedule):
    run, want = train(CUBE, schedule, dtype=dtype), expected()
    np.testing.assert_allclose(run.losses, want.losses, rtol=2e-3)
    assert run.losses != want.losses
    got, there = (
        np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(params)])
        for params in (run.params, want.params)
    )
    assert 0 < np.linalg.norm(got - there) < 1e-2 * np.linalg.norm(there)
