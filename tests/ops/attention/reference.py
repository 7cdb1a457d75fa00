# SPDX-License-Identifier: Apache-2.0
"""Attention with a matrix of scores, which the implementations are tested against.

It computes in f32, or f64 for f64 operands, and needs memory for the square of the
sequence.

Source: A. Vaswani et al., arXiv 1706.03762; for groups, J. Ainslie et al., arXiv
2305.13245.
"""

import jax.numpy as jnp
from jax import Array

from tessera.ops.attention.dispatch import Operands, Options


def attend(operands: Operands, options: Options) -> Array:
    """The output of the queries: ``[B, H, S, D]``."""
    wide = jnp.float64 if operands.q.dtype == jnp.float64 else jnp.float32
    q_BHSD, k_BGTD, v_BGTD = (x.astype(wide) for x in operands[:3])
    B, H, S, D = q_BHSD.shape
    G = k_BGTD.shape[1]
    q_BGRSD = q_BHSD.reshape(B, G, H // G, S, D)
    scores = jnp.einsum("bgrsd,bgtd->bgrst", q_BGRSD, k_BGTD, precision="highest")
    scores = scores * options.scale
    if options.soft_cap is not None:
        scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
    mask = visible(operands, options)[:, None, None]
    # Finite also in rows that are fully masked, whose weights become zero below.
    scores = jnp.where(mask, scores, jnp.finfo(wide).min)
    weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = jnp.where(mask, weights, 0.0)
    total = weights.sum(axis=-1, keepdims=True)
    weights = weights / jnp.where(total == 0.0, 1.0, total)
    out = jnp.einsum("bgrst,bgtd->bgrsd", weights, v_BGTD, precision="highest")
    return out.reshape(B, H, S, D).astype(operands.q.dtype)


def visible(operands: Operands, options: Options) -> Array:
    """Which keys each query attends to: bool ``[B or 1, S, T]``."""
    S, T = operands.q.shape[2], operands.k.shape[2]
    query = jnp.arange(S, dtype=jnp.int32)
    distance = query[:, None] - jnp.arange(T, dtype=jnp.int32)
    mask = jnp.ones_like(distance, bool)
    if options.causal:
        mask = mask & (distance >= 0)
    window = options.window if operands.window is None else operands.window
    if window is not None:
        mask = mask & (distance < window)
    if (ids := operands.segments) is None:
        return mask[None]
    return mask & (ids[:, :, None] == ids[:, None])
