# SPDX-License-Identifier: Apache-2.0
"""Each expert takes a fixed number of tokens of a sequence; the others are dropped.

A dropped choice adds nothing, so a token whose choices are all dropped passes through
the residual alone. Every shape is static, and experts are one batched matmul.

The group that a capacity is counted in is a sequence, not a device: which tokens are
dropped depends neither on the mesh nor on the other rows of the batch.

Source: GShard, arXiv 2006.16668.
"""

import jax
import jax.numpy as jnp
from jax import Array

from tessera.ops.moe.exchange import all_to_all, num_devices
from tessera.ops.moe.experts import Weights, batched
from tessera.ops.moe.routing import Routes, RoutingOptions


def limited(
    x_BSD: Array,
    routes: Routes,
    weights: Weights,
    options: RoutingOptions,
    axes: tuple[str, ...],
) -> tuple[Array, Array]:
    """What the experts that had a place say, weighted, and how many choices had none.

    Args:
      x_BSD: This device's sequences.
      routes: Theirs, ``[B, S, K]`` and ``[B, S, E]``.
      weights: Of this device's experts.
      options: For the capacity.
      axes: The axes that the experts are split over.

    Returns:
      ``[B, S, D]``, and an f32 scalar.
    """
    B, S, D = x_BSD.shape
    E, K = routes.logits.shape[-1], options.top_k
    C = options.capacity(S, E)
    slot_BSK = slots(routes.experts, E, C)
    row_B11 = jnp.arange(B, dtype=jnp.int32)[:, None, None]
    token_BSK = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32)[:, None], (B, S, K))
    # Which token each slot holds; S is nobody.
    token_BX = jnp.full((B, E * C), S).at[row_B11, slot_BSK].set(token_BSK, mode="drop")
    rows_BXD = x_BSD.at[row_B11[..., 0], token_BX].get(mode="fill", fill_value=0)
    rows_EXD = jnp.moveaxis(rows_BXD.reshape(B, E, C, D), 1, 0).reshape(E, B * C, D)
    said_EXD = _exchanged(rows_EXD, weights, axes)
    said_BXD = jnp.moveaxis(said_EXD.reshape(E, B, C, D), 1, 0).reshape(B, E * C, D)
    said_BSKD = said_BXD.at[row_B11, slot_BSK].get(mode="fill", fill_value=0)
    weighted = routes.weights[..., None] * said_BSKD.astype(jnp.float32)
    dropped = (slot_BSK == E * C).sum(dtype=jnp.float32)
    return weighted.sum(axis=2).astype(x_BSD.dtype), dropped


def slots(experts_BSK: Array, num_experts: int, capacity: int) -> Array:
    """The slot of each choice: ``expert · capacity + place``, past all if none is left.

    Example:
      >>> slots(jnp.array([[[0, 1], [0, 1], [0, 2]]]), 3, 2)[0]
      Array([[0, 2],
             [1, 3],
             [6, 4]], dtype=int32)
    """
    B, S, K = experts_BSK.shape
    # First choices of all tokens before second ones: a token that must lose a choice
    # loses the one it wanted less.
    queue_BX = jnp.swapaxes(experts_BSK, 1, 2).reshape(B, K * S)
    joined = jax.nn.one_hot(queue_BX, num_experts, dtype=jnp.int32)
    place_BX = (jnp.cumsum(joined, axis=1) * joined).sum(axis=-1) - 1
    slot_BX = jnp.where(
        place_BX < capacity, queue_BX * capacity + place_BX, num_experts * capacity
    )
    return jnp.swapaxes(slot_BX.reshape(B, K, S), 1, 2)


def _exchanged(rows_EXD: Array, weights: Weights, axes: tuple[str, ...]) -> Array:
    """Rows to their experts and back, ``[E, X, D]`` of all experts."""
    if not axes:
        return batched(rows_EXD, weights)
    (E, X, D), P = rows_EXD.shape, num_devices(axes)
    with jax.named_scope("dispatch"):
        got_PEXD = all_to_all(rows_EXD.reshape(P, E // P, X, D), axes)
    rows = jnp.moveaxis(got_PEXD, 0, 1).reshape(E // P, P * X, D)
    said = jnp.moveaxis(batched(rows, weights).reshape(E // P, P, X, D), 1, 0)
    with jax.named_scope("combine"):
        return all_to_all(said, axes, returning=True).reshape(E, X, D)
