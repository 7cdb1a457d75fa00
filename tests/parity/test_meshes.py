# SPDX-License-Identifier: Apache-2.0
"""One step, any mesh: the same losses and the same gradients.

The model is the whole ``tiny``: its width, its six layers, its heads, its vocabulary.
Scaled down for time are the sequences (16 tokens instead of 128), with them the window
of local layers (8 instead of 64), and the batch (8 rows). What a mesh is compared with
knows nothing of Tessera: ``jax.grad`` of the plain model and Optax on one device.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

from tessera.mesh import Mesh
from tessera.train.config.optimizer_config import AdamWConfig
from tessera.train.config.step_config import StepConfig, batch_spec
from tessera.train.loop.optimizers import make_optimizer
from tessera.train.loop.step import make_train_step
from tessera.train.loop.train_state import init_state
from tessera.train.models import DecoderModel, config_of

STEPS, ROWS, LENGTH = 3, 8, 16
MODEL = DecoderModel(dataclasses.replace(config_of("tiny"), window=8))
KEY = jax.random.key(0)
ADAMW, RATE = make_optimizer(
    AdamWConfig(epsilon=1e-3, warmup_steps=1), steps=20, clip_norm=1.0
)


# A trace without decay holds the gradients of the last step.
OPTIMIZER = optax.chain(optax.trace(decay=0.0), ADAMW)


def batches() -> list[dict[str, np.ndarray]]:
    """Batches of random tokens; a quarter of the targets do not count."""
    draw = np.random.default_rng(0)
    shape, column = (1, ROWS, LENGTH), np.arange(LENGTH, dtype=np.int32)
    found = []
    for _ in range(STEPS):
        tokens = draw.integers(0, 264, (1, ROWS, LENGTH + 1), np.int32)
        ignored = draw.random(shape) < 0.25
        found.append(
            {
                "tokens": tokens[..., :-1],
                "targets": np.where(ignored, np.int32(-100), tokens[..., 1:]),
                # Two documents in each row.
                "segment_ids": np.broadcast_to(1 + column // 10, shape),
                "positions": np.broadcast_to(column % 10, shape),
            }
        )
    return found


@dataclasses.dataclass
class Run:
    """Losses of all steps, gradients of the first, and the layouts they had."""

    losses: list[float]
    gradients: Any
    layouts: Any = None


@pytest.fixture(scope="module")
def expected() -> Run:
    """Steps of the plain model on one device, without Tessera."""

    def mean_loss(params: Any, batch: Any) -> jax.Array:
        micro = {name: array[0] for name, array in batch.items()}
        logits = MODEL.apply(
            params,
            micro["tokens"],
            positions=micro["positions"],
            segment_ids=micro["segment_ids"],
        )
        counts = micro["targets"] != -100
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits, jnp.where(counts, micro["targets"], 0)
        )
        return jnp.where(counts, losses, 0.0).sum() / counts.sum(dtype=jnp.float32)

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(mean_loss)(params, batch)
        updates, state = ADAMW.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss, gradients

    params = MODEL.init(KEY)
    state = ADAMW.init(params)
    run = Run([], None)
    for batch in batches():
        params, state, loss, gradients = step(params, state, batch)
        run.losses.append(float(loss))
        run.gradients = run.gradients or jax.tree.map(np.asarray, gradients)
    return run


def train(axes: tuple[str, ...], sizes: tuple[int, ...]) -> Run:
    """The same steps by Tessera on a mesh."""
    mesh = Mesh(axes, devices=range(math.prod(sizes)), shape=sizes)
    config = StepConfig(
        model=MODEL,
        optimizer=OPTIMIZER,
        learning_rate=RATE,
        mesh=mesh,
        # On every mesh several chunks, on some of them an uneven one.
        loss_chunk=6,
    )
    state = init_state(MODEL, OPTIMIZER, KEY, mesh)
    step = make_train_step(config, state)
    place = NamedSharding(mesh.jax, batch_spec(config))
    run = Run([], None)
    for batch in batches():
        state, metrics = step(state, jax.device_put(batch, place))
        run.losses.append(float(metrics["loss"]))
        if run.gradients is None:
            kept = state.optimizer[0].trace
            run.gradients = jax.tree.map(np.asarray, kept)
            run.layouts = (
                jax.tree.map(lambda g: g.sharding, kept),
                jax.tree.map(lambda p: p.sharding, state.params),
            )
    return run


@pytest.mark.full
@pytest.mark.parametrize(
    ("axes", "sizes"),
    [
        # An axis of one device, an axis that shares key and value heads, and all axes.
        (("fsdp", "tp"), (4, 1)),
        (("tp", "fsdp"), (4, 2)),
        (("dp", "fsdp", "tp"), (2, 2, 2)),
    ],
    ids=lambda value: "_".join(map(str, value)),
)
def test_losses_and_gradients_are_those_of_one_device(axes, sizes, expected):
    run = train(axes, sizes)
    np.testing.assert_allclose(run.losses, expected.losses, rtol=1e-5, atol=0)
    assert len(run.losses) == STEPS
    assert np.ptp(run.losses) > 0.02, "the losses have to move to be worth comparing"

    wanted = jax.tree_util.tree_leaves_with_path(expected.gradients)
    for (path, want), got in zip(wanted, jax.tree.leaves(run.gradients), strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        size = np.linalg.norm(want)
        assert size > 0, name
        assert np.linalg.norm(got - want) <= 1e-5 * size, name

    gradients, params = run.layouts
    assert gradients == params
