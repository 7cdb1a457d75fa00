# SPDX-License-Identifier: Apache-2.0
"""Experts with a capacity factor: tokens of a sequence above the capacity are dropped.

A dropped assignment adds nothing, so a token without assignments passes only through
the residual. Every shape is static, and the experts are one batched matmul.

The capacity counts tokens of a sequence, not of a device: which tokens are dropped
depends neither on the mesh nor on the other rows of the batch.

Source: GShard, arXiv 2006.16668.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from tessera.ops.moe.experts import Weights, all_to_all, batched
from tessera.ops.moe.routing import Routes, RoutingOptions


def with_capacity(
    x_BSD: Array,
    routes: Routes,
    weights: Weights,
    options: RoutingOptions,
    axes: tuple[str, ...],
) -> tuple[Array, Array]:
    """The weighted sum of the experts' outputs, and the number of dropped assignments.

    Args:
      x_BSD: This device's sequences.
      routes: Of these tokens, ``[B, S, K]`` and ``[B, S, E]``.
      weights: Of this device's experts.
      options: For the capacity factor.
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
    # The token of each slot; S where the slot is empty.
    token_BX = jnp.full((B, E * C), S).at[row_B11, slot_BSK].set(token_BSK, mode="drop")
    rows_BXD = x_BSD.at[row_B11[..., 0], token_BX].get(mode="fill", fill_value=0)
    rows_EXD = jnp.moveaxis(rows_BXD.reshape(B, E, C, D), 1, 0).reshape(E, B * C, D)
    out_EXD = _apply_experts(rows_EXD, weights, axes, options.activation)
    out_BXD = jnp.moveaxis(out_EXD.reshape(E, B, C, D), 1, 0).reshape(B, E * C, D)
    out_BSKD = out_BXD.at[row_B11, slot_BSK].get(mode="fill", fill_value=0)
    weighted = routes.weights[..., None] * out_BSKD.astype(jnp.float32)
    dropped = (slot_BSK == E * C).sum(dtype=jnp.float32)
    return weighted.sum(axis=2).astype(x_BSD.dtype), dropped


def slots(experts_BSK: Array, num_experts: int, capacity: int) -> Array:
    """The slot of each assignment, ``expert · capacity + index``; E · C if dropped.

    Example:
      >>> slots(jnp.array([[[0, 1], [0, 1], [0, 2]]]), 3, 2)[0]
      Array([[0, 2],
             [1, 3],
             [6, 4]], dtype=int32)
    """
    B, S, K = experts_BSK.shape
    # The first choices of all tokens come before the second ones: a token loses the
    # assignments with the lowest scores.
    queue_BX = jnp.swapaxes(experts_BSK, 1, 2).reshape(B, K * S)
    one_hot = jax.nn.one_hot(queue_BX, num_experts, dtype=jnp.int32)
    index_BX = (jnp.cumsum(one_hot, axis=1) * one_hot).sum(axis=-1) - 1
    slot_BX = jnp.where(
        index_BX < capacity, queue_BX * capacity + index_BX, num_experts * capacity
    )
    return jnp.swapaxes(slot_BX.reshape(B, K, S), 1, 2)


def _apply_experts(
    rows_EXD: Array, weights: Weights, axes: tuple[str, ...], activation: str
) -> Array:
    """Apply the experts to ``[E, X, D]``, rows for all experts."""
    if not axes:
        return batched(rows_EXD, weights, activation)
    (E, X, D), P = rows_EXD.shape, lax.axis_size(axes)
    with jax.named_scope("dispatch"):
        received_PEXD = all_to_all(rows_EXD.reshape(P, E // P, X, D), axes)
    rows = jnp.moveaxis(received_PEXD, 0, 1).reshape(E // P, P * X, D)
    out = batched(rows, weights, activation)
    out = jnp.moveaxis(out.reshape(E // P, P, X, D), 1, 0)
    with jax.named_scope("combine"):
        return all_to_all(out, axes, reverse=True).reshape(E, X, D)
