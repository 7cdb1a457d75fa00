# SPDX-License-Identifier: Apache-2.0
"""Attention as it is written in books: what the other implementations are tested by.

Everything is f32 inside, f64 for operands of f64, and as large as the square of the
sequence.

Source: A. Vaswani et al., arXiv 1706.03762; for groups, J. Ainslie et al., arXiv
2305.13245.
"""

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array

from tessera.ops.attention.attention_call import Operands, Setting

if TYPE_CHECKING:
    from tessera.ops.attention.dispatch import Device


def why_not(operands: Operands, setting: Setting, device: "Device") -> str | None:
    """It serves every call."""
    del operands, setting, device
    return None


def attend(operands: Operands, setting: Setting) -> Array:
    """What the queries read: ``[B, H, S, D]``."""
    wide = jnp.float64 if operands.q.dtype == jnp.float64 else jnp.float32
    q_BHSD, k_BGTD, v_BGTD = (x.astype(wide) for x in operands[:3])
    B, H, S, D = q_BHSD.shape
    G = k_BGTD.shape[1]
    q_BGRSD = q_BHSD.reshape(B, G, H // G, S, D)
    scores = jnp.einsum("bgrsd,bgtd->bgrst", q_BGRSD, k_BGTD, precision="highest")
    scores = scores * setting.scale
    if setting.soft_cap is not None:
        scores = setting.soft_cap * jnp.tanh(scores / setting.soft_cap)
    seen = visible(operands, setting)[:, None, None]
    # Finite also where nothing is seen: no number that is divided by zero is used.
    scores = jnp.where(seen, scores, jnp.finfo(wide).min)
    weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = jnp.where(seen, weights, 0.0)
    total = weights.sum(axis=-1, keepdims=True)
    weights = weights / jnp.where(total == 0.0, 1.0, total)
    read = jnp.einsum("bgrst,bgtd->bgrsd", weights, v_BGTD, precision="highest")
    return read.reshape(B, H, S, D).astype(operands.q.dtype)


def visible(operands: Operands, setting: Setting) -> Array:
    """Which keys each query sees: bool ``[B or 1, S, T]``."""
    S, T = operands.q.shape[2], operands.k.shape[2]
    query = jnp.arange(S, dtype=jnp.int32) + jnp.int32(setting.offset)
    if operands.offset is not None:
        query = query + operands.offset
    distance = query[:, None] - jnp.arange(T, dtype=jnp.int32)
    seen = jnp.ones_like(distance, bool)
    if setting.causal:
        seen = seen & (distance >= 0)
    window = setting.window if operands.window is None else operands.window
    if window is not None:
        seen = seen & (distance < window)
    if operands.query_segments is None or operands.key_segments is None:
        return seen[None]
    same = operands.query_segments[:, :, None] == operands.key_segments[:, None]
    return seen & same
