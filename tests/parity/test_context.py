# SPDX-License-Identifier: Apache-2.0
"""Training with sequences split over ``cp`` equals training on one device.

What a mesh is compared with knows nothing of Tessera: ``jax.grad`` of the plain model
and Optax on one device. Parameters are compared after three steps of AdamW, whose
epsilon is large enough for a step to be a smooth function of the gradient. Of the three
layers two read a window; rows hold two documents and padding. Pipelines with sequences
that are split are in ``test_pipelines.py``.
"""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from tessera.mesh import Mesh
from tessera.train.config.optimizer_config import AdamWConfig
from tessera.train.config.step_config import StepConfig, batch_spec
from tessera.train.loop.optimizers import make_optimizer
from tessera.train.loop.step import make_eval_step, make_train_step
from tessera.train.loop.train_state import init_state
from tessera.train.models import DecoderConfig, DecoderModel
from tests.parity.plain_training import summed_loss, train_on_one_device

STEPS, MICROBATCHES, ROWS, LENGTH = 3, 2, 4, 32
CONFIG = DecoderConfig(
    vocab_size=64,
    d_model=32,
    num_layers=3,
    num_heads=8,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=64,
    window=7,
    query_pre_attn_scalar=8,
    global_every=3,
)
KEY = jax.random.key(0)
ADAMW, RATE = make_optimizer(
    AdamWConfig(epsilon=1e-3, warmup_steps=1), steps=20, clip_norm=1.0
)


def batches() -> list[dict[str, np.ndarray]]:
    """Random tokens; a quarter of the targets do not count, nor the padding."""
    draw = np.random.default_rng(0)
    shape, column = (MICROBATCHES, ROWS, LENGTH), np.arange(LENGTH, dtype=np.int32)
    segments = np.where(column < 28, 1 + column // 13, 0)
    found = []
    for _ in range(STEPS):
        tokens = draw.integers(0, 64, (MICROBATCHES, ROWS, LENGTH + 1), np.int32)
        ignored = (draw.random(shape) < 0.25) | (segments == 0)
        found.append(
            {
                "tokens": tokens[..., :-1],
                "targets": np.where(ignored, np.int32(-100), tokens[..., 1:]),
                "segment_ids": np.broadcast_to(segments, shape).astype(np.int32),
                "positions": np.broadcast_to(column % 13, shape),
            }
        )
    return found


@dataclasses.dataclass
class Run:
    """Losses of all steps, the loss of a validation, and the parameters at the end."""

    losses: list[float]
    validation: float
    params: Any


@pytest.fixture(scope="module")
def expected() -> Run:
    """The steps of the plain model on one device, without Tessera."""
    model = DecoderModel(CONFIG)
    losses, params = train_on_one_device(model, ADAMW, KEY, batches())
    first = {name: array[0] for name, array in batches()[0].items()}
    return Run(losses, float(summed_loss(model, params, first)), params)


def train(model: DecoderModel, mesh: Mesh, sync_every: int) -> Run:
    """The same steps by Tessera on a mesh."""
    config = StepConfig(
        model=model,
        optimizer=ADAMW,
        learning_rate=RATE,
        mesh=mesh,
        accumulation=MICROBATCHES,
        sync_every=sync_every,
        loss_chunk=6,
    )
    state = init_state(model, ADAMW, KEY, mesh)
    step, losses = make_train_step(config, state), []
    place = NamedSharding(mesh.jax, batch_spec(config))
    for batch in batches():
        state, metrics = step(state, jax.device_put(batch, place))
        losses.append(float(metrics["loss"]))
    first = {name: array[0] for name, array in batches()[0].items()}
    sums, _ = make_eval_step(config)(state.params, first)
    return Run(losses, float(sums["loss"]), jax.tree.map(np.asarray, state.params))


# A window of seven tokens is longer than the two chunks of four that a device of "ring"
# has, so that its local layers pass keys around the ring too; the others take the halo.
CASES = {
    "ring": ({"fsdp": 2, "cp": 4}, 1, {"remat": "full"}),
    "halo_tp": ({"cp": 2, "tp": 4}, 1, {"sequence_parallel": True}),
    "halo_seldom": ({"dp": 2, "cp": 2}, 2, {}),
    "all_to_all": ({"cp": 4}, 1, {"context_parallel": "all_to_all"}),
}


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_losses_and_parameters_are_those_of_one_device(case, expected):
    shape, sync_every, options = CASES[case]
    mesh = Mesh(
        [*shape], devices=range(math.prod(shape.values())), shape=[*shape.values()]
    )
    run = train(DecoderModel(CONFIG, **options), mesh, sync_every)
    np.testing.assert_allclose(run.losses, expected.losses, rtol=2e-5, atol=0)
    np.testing.assert_allclose(run.validation, expected.validation, rtol=2e-5)
    assert np.ptp(run.losses) > 0.01, "the losses have to move to be worth comparing"
    there = jax.tree_util.tree_leaves_with_path(expected.params)
    for (path, wanted), got in zip(there, jax.tree.leaves(run.params), strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        assert np.linalg.norm(got - wanted) <= 2e-5 * np.linalg.norm(wanted), name
