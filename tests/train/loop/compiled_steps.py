# SPDX-License-Identifier: Apache-2.0
"""Steps of a small model on several meshes, each compiled once for all its tests."""

import dataclasses
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

from tessera.mesh import Mesh
from tessera.ops.loss_scale import LossScale
from tessera.train.config.optimizer_config import AdamWConfig
from tessera.train.config.step_config import StepConfig, batch_spec
from tessera.train.loop.optimizers import make_optimizer
from tessera.train.loop.step import make_train_step
from tessera.train.loop.train_state import (
    TrainState,
    init_state,
    state_specs,
)
from tessera.train.models import DecoderModel
from tests.small_model import SMALL

CONFIG = SMALL
# With a usual epsilon Adam begins with a sign, which rounding turns where a gradient is
# almost nothing; with this one a step is as smooth as the gradient.
ADAMW, RATE = make_optimizer(AdamWConfig(epsilon=1e-3), steps=10, clip_norm=1.0)
ONE = Mesh(("fsdp", "tp"), devices=(0,), shape=(1, 1))
CUBE = Mesh(("dp", "fsdp", "tp"), devices=range(8), shape=(2, 2, 2))
MICROBATCHES, ROWS, LENGTH = 4, 8, 16


def make_batch(ignored: tuple[float, ...] = (0.0, 0.3, 0.6, 0.95)) -> dict[str, Any]:
    """Microbatches of which different shares of the targets do not count."""
    draw = np.random.default_rng(0)
    shape = (len(ignored), ROWS, LENGTH)
    tokens = draw.integers(0, 64, (*shape[:2], LENGTH + 1), np.int32)
    hidden = draw.random(shape) < np.array(ignored)[:, None, None]
    return {
        "tokens": tokens[..., :-1],
        "targets": np.where(hidden, np.int32(-100), tokens[..., 1:]),
        "segment_ids": np.ones(shape, np.int32),
        "positions": np.broadcast_to(np.arange(LENGTH, dtype=np.int32), shape),
    }


BATCH = make_batch()
COUNTED = int((BATCH["targets"] != -100).sum())


def config_on(
    mesh: Mesh,
    *,
    sequence_parallel: bool = False,
    dtype: str | None = None,
    fp8: bool = False,
    **options: Any,
) -> StepConfig:
    model = DecoderModel(
        CONFIG, sequence_parallel=sequence_parallel, dtype=dtype, fp8=fp8
    )
    return StepConfig(
        model=model,
        # A trace without decay holds the gradients of the last step.
        optimizer=optax.chain(optax.trace(decay=0.0), ADAMW),
        learning_rate=RATE,
        mesh=mesh,
        **{"accumulation": MICROBATCHES, "loss_chunk": 6, **options},
    )


@cache
def first_state(*, scaled: bool = False) -> TrainState:
    """A fresh state in the memory of the host, to be copied to any mesh."""
    config, scale = config_on(ONE), LossScale.dynamic() if scaled else None
    key = jax.random.key(0)
    state = init_state(config.model, config.optimizer, key, ONE)
    state = dataclasses.replace(state, loss_scale=scale)
    return jax.tree.map(np.array, state)


def placed(config: StepConfig, state: TrainState) -> TrainState:
    specs = state_specs(
        config.model, config.optimizer, config.mesh, loss_scale=state.loss_scale
    )
    shardings = jax.tree.map(lambda s: NamedSharding(config.mesh.jax, s), specs)
    return jax.device_put(jax.tree.map(np.array, state), shardings)


def put(config: StepConfig, batch: Any) -> Any:
    return jax.device_put(batch, NamedSharding(config.mesh.jax, batch_spec(config)))


@dataclasses.dataclass
class Ran:
    """A compiled step and what its first call gave."""

    config: StepConfig
    step: Any
    given: TrainState
    state: TrainState
    metrics: dict[str, jax.Array]

    @property
    def gradients(self) -> Any:
        return self.state.optimizer[0].trace

    def again(self, state: TrainState, batch: Any = None) -> Any:
        """Another call of the program, from a copy of some state."""
        batch = BATCH if batch is None else batch
        return self.step(placed(self.config, state), put(self.config, batch))


@cache
def run(mesh: Mesh, **options: Any) -> Ran:
    config = config_on(mesh, **options)
    scaled = config.model.dtype == "float16"
    given = placed(config, first_state(scaled=scaled))
    step = make_train_step(config, given)
    state, metrics = step(given, put(config, BATCH))
    return Ran(config, step, given, state, metrics)


@cache
def plain_loss_and_gradients() -> tuple[float, Any]:
    """Mean loss per counted token of the whole batch at once, and its gradients."""
    whole = {name: array.reshape(-1, LENGTH) for name, array in BATCH.items()}

    def mean_loss(params: Any) -> jax.Array:
        logits = DecoderModel(CONFIG).apply(
            params,
            whole["tokens"],
            positions=whole["positions"],
            segment_ids=whole["segment_ids"],
        )
        counts = whole["targets"] != -100
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits, jnp.where(counts, whole["targets"], 0)
        )
        return jnp.where(counts, losses, 0.0).sum() / COUNTED

    loss, gradients = jax.jit(jax.value_and_grad(mean_loss))(first_state().params)
    return float(loss), jax.tree.map(np.asarray, gradients)


def distances(got: Any, want: Any) -> dict[str, float]:
    """How far each leaf is from another tree's, as a share of its norm."""
    found = {}
    wanted = jax.tree_util.tree_leaves_with_path(want)
    for (path, there), here in zip(wanted, jax.tree.leaves(got), strict=True):
        size = np.linalg.norm(there)
        assert size > 0
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        found[name] = float(np.linalg.norm(np.asarray(here) - there) / size)
    return found
