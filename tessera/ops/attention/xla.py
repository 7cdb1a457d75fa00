# SPDX-License-Identifier: Apache-2.0
"""Attention by XLA, whose memory grows with the sequence, not with its square.

The blocks of ``blockwise`` on whole sequences. What is kept for the backward pass is
the operands, the result and one number for each query; the weights are computed again.

Source: T. Dao et al., FlashAttention, arXiv 2205.14135.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array

from tessera.ops.attention.blockwise import (
    Keys,
    Mask,
    Queries,
    Rows,
    Saved,
    Softmax,
    Tiling,
    fold,
    fold_gradients,
    zeros_like,
)
from tessera.ops.attention.operands import Operands, Setting
from tessera.ops.attention.spread import NO_WINDOW

if TYPE_CHECKING:
    from tessera.ops.attention.choice import Device


def why_not(operands: Operands, setting: Setting, device: "Device") -> str | None:
    """Why it cannot serve such a call on that device; or None."""
    del setting, device
    if operands.q.dtype == jnp.float64:
        return "its scores are f32, and the operands f64"
    return None


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def attend(operands: Operands, setting: Setting) -> Array:
    """What the queries read: ``[B, H, S, D]``."""
    return _forward(operands, setting)[0]


def _forward(operands: Operands, setting: Setting) -> Any:
    queries, rows, keys, _ = _blocks(operands, setting)
    state = fold(Softmax.before(queries), queries, keys, _mask(operands, setting))
    read, log_total = state.result()
    out = rows.unheads(read).astype(operands.q.dtype)
    log_total = rows.unheads(log_total[..., None])[..., 0]
    return jnp.swapaxes(out, 1, 2), (operands, out, log_total)


def _backward(setting: Setting, kept: Any, gradient: Array) -> Any:
    operands, out, log_total = kept
    queries, rows, keys, columns = _blocks(operands, setting)
    gradient = jnp.swapaxes(gradient, 1, 2)
    saved = Saved.of(rows, operands.k.shape[1], log_total, out, gradient)
    zeros = zeros_like(queries.q), zeros_like(keys.k), zeros_like(keys.v)
    mask = _mask(operands, setting)
    of_q, of_k, of_v = fold_gradients(zeros, queries, saved, keys, mask)
    of_q = of_q * setting.scale

    def whole(tiling: Tiling, x: Array, like: Array) -> Array:
        return jnp.swapaxes(tiling.unheads(x), 1, 2).astype(like.dtype)

    q, k, v = operands[:3]
    none = (None, None, None)
    of = whole(rows, of_q, q), whole(columns, of_k, k), whole(columns, of_v, v)
    return (Operands(*of, *none),)


attend.defvjp(_forward, _backward)


class _WholeBatch(Mask):
    """A mask whose blocks are skipped by places alone.

    Where a batch is split over devices, whether a segment is met anywhere in it would
    be a collective for each pair of blocks.
    """

    def may_see(self, queries: Rows, keys: Rows) -> Array:
        """False only where no row of the batch may see a key, segments aside."""
        return super().may_see(
            queries._replace(segment=None), keys._replace(segment=None)
        )


def _mask(operands: Operands, setting: Setting) -> Mask:
    kind = Mask if operands.query_segments is None else _WholeBatch
    window = NO_WINDOW if setting.window is None else setting.window
    return kind(setting.causal, jnp.int32(window), setting.soft_cap)


def _blocks(
    operands: Operands, setting: Setting
) -> tuple[Queries, Tiling, Keys, Tiling]:
    """Queries and keys cut into blocks."""
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in operands[:3])
    rows, columns = Tiling(1, q.shape[1]), Tiling(1, k.shape[1])
    first = jnp.int32(setting.offset)
    if operands.offset is not None:
        first = first + operands.offset
    places = jnp.arange(rows.length, dtype=jnp.int32) + first
    queries = Queries(
        rows.heads(q * jnp.asarray(setting.scale, q.dtype), k.shape[2]),
        Rows.of(rows, places, operands.query_segments),
    )
    places = jnp.arange(columns.length, dtype=jnp.int32)
    keys = Keys(
        columns.heads(k),
        columns.heads(v),
        Rows.of(columns, places, operands.key_segments),
    )
    return queries, rows, keys, columns
