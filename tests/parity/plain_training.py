# SPDX-License-Identifier: Apache-2.0
"""The oracle of parity tests: training in plain JAX and Optax on one device.

It knows nothing of Tessera but ``model.apply``, the plain function of a model.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tessera.train.models import DecoderModel


def summed_loss(
    model: DecoderModel, params: Any, batch: Mapping[str, Any]
) -> jax.Array:
    """The sum over all targets but -100; leading dims are rows of one batch."""
    length = batch["tokens"].shape[-1]
    rows = {name: array.reshape(-1, length) for name, array in batch.items()}
    logits = model.apply(
        params,
        rows["tokens"],
        positions=rows["positions"],
        segment_ids=rows["segment_ids"],
    )
    counts = rows["targets"] != -100
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits, jnp.where(counts, rows["targets"], 0)
    )
    return jnp.where(counts, losses, 0.0).sum()


def train_on_one_device(
    model: DecoderModel,
    optimizer: optax.GradientTransformation,
    key: jax.Array,
    batches: Iterable[Mapping[str, Any]],
) -> tuple[list[float], Any]:
    """The mean loss of each step, and the parameters after the last."""

    def mean_loss(params: Any, batch: Any) -> jax.Array:
        count = (batch["targets"] != -100).sum(dtype=jnp.float32)
        return summed_loss(model, params, batch) / count

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(mean_loss)(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = model.init(key)
    state, losses = optimizer.init(params), []
    for batch in batches:
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
    return losses, params
