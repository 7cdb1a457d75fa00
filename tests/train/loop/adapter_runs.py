# SPDX-License-Identifier: Apache-2.0
"""Runs that train adapters beside weights of a folder, up to one step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tessera.foundations.tree import named_leaves, nest
from tessera.train.loop.build_run import Run
from tessera.train.loop.train_state import init_state
from tessera.train.models.weights import import_weights


def begun(run: Run) -> Any:
    """The state before the first step, with adapters that are not zero."""
    config, layouts = run.step_config, run.step_config.zero.params
    params = import_weights(
        run.config.training.init_from or "",
        run.model,
        run.mesh,
        layouts=layouts,
        adapters=run.model.init(jax.random.key(0), run.mesh, layouts=layouts),
    )
    plain = on_host(run.model.plain(params))
    for number, name in enumerate(sorted(run.model.adapters)):
        plain[name] = np.random.default_rng(number).normal(size=plain[name].shape) / 8
    params = jax.tree.map(
        lambda x, old: jax.device_put(jnp.asarray(x, old.dtype), old.sharding),
        run.model.stored(nest(plain)),
        params,
    )
    return init_state(
        run.model,
        config.optimizer,
        jax.random.key(0),
        run.mesh,
        params=params,
        zero_stage=config.zero_stage,
    )


def on_host(params: Any) -> dict[str, np.ndarray]:
    """Parameters by name, as arrays of NumPy."""
    return named_leaves(jax.tree.map(np.asarray, params))


def batch_of(run: Run) -> dict[str, np.ndarray]:
    """Eight rows in microbatches."""
    tokens = np.random.default_rng(0).integers(0, 264, (8, 17), np.int32)
    batch = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segment_ids": np.ones((8, 16), np.int32),
        "positions": np.broadcast_to(np.arange(16, dtype=np.int32), (8, 16)),
    }
    steps = run.config.training.gradient_accumulation_steps
    return {name: x.reshape(steps, -1, 16) for name, x in batch.items()}


def stepped(run: Run) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The parameters before and after one step, without stages, by name."""
    state = begun(run)
    before = on_host(run.model.plain(state.params))
    state, _ = run.step(state, batch_of(run))
    return before, on_host(run.model.plain(state.params))
