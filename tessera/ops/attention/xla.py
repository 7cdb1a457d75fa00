# SPDX-License-Identifier: Apache-2.0
"""Attention by XLA, in memory linear in the length of the sequence.

Blockwise attention over whole sequences. The residuals are the operands, the output and
one number for each query; the backward pass recomputes the weights.

Source: T. Dao et al., FlashAttention, arXiv 2205.14135.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from tessera.ops.attention.blockwise import (
    Keys,
    Mask,
    OutputGradients,
    Queries,
    attend_blocks,
    delta_of,
    fold_gradients,
    sum_dtype,
    zeros_like,
)
from tessera.ops.attention.context_parallel_variants import NO_WINDOW
from tessera.ops.attention.dispatch import Device, Operands, Options
from tessera.ops.attention.tiling import (
    MAX_SCORES_ACCELERATOR,
    MAX_SCORES_CPU,
    Rows,
    Tiling,
)
from tessera.ops.rematerialization import ATTENTION_RESIDUALS
from tessera.tracing import scope


def unsupported_reason(
    operands: Operands, options: Options, device: Device
) -> str | None:
    """None: every call is supported."""
    del operands, options, device
    return None


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def attend(operands: Operands, options: Options) -> Array:
    """The output of the queries: ``[B, H, S, D]``."""
    return _forward(operands, options)[0]


def _forward(operands: Operands, options: Options) -> Any:
    call = _BlockedCall.of(operands, options)
    out, lse = attend_blocks(call.queries, call.keys, call.mask)
    if operands.sinks is not None:
        sinks = _sink_blocks(call, operands, operands.sinks)
        out = out * jax.nn.sigmoid(lse - sinks)[..., None]
        lse = jnp.logaddexp(lse, sinks)
    out = call.rows.unblocks(out).astype(operands.q.dtype)
    out = checkpoint_name(out, ATTENTION_RESIDUALS)
    lse = checkpoint_name(lse, ATTENTION_RESIDUALS)
    return out, (operands, out, lse)


def _backward(options: Options, residuals: Any, dout: Array) -> Any:
    operands, out, lse = residuals
    call = _BlockedCall.of(operands, options)
    rows, columns, groups = call.rows, call.columns, operands.k.shape[1]
    delta = rows.blocks(delta_of(out, dout)[..., None], groups)[..., 0]
    outputs = OutputGradients(rows.blocks(dout, groups), lse, delta)
    zeros = zeros_like(call.queries.q), zeros_like(call.keys.k), zeros_like(call.keys.v)
    dq, dk, dv = fold_gradients(zeros, call.queries, outputs, call.keys, call.mask)
    q, k, v = operands[:3]
    dsinks = None
    if operands.sinks is not None:  # a weight like any other, of the value zero
        weights = jnp.exp(_sink_blocks(call, operands, operands.sinks) - lse)
        shares = rows.unblocks((weights * delta)[..., None])
        dsinks = -shares.sum(axis=(0, 2, 3)).astype(operands.sinks.dtype)
    return (
        Operands(
            rows.unblocks(dq).astype(q.dtype),
            columns.unblocks(dk).astype(k.dtype),
            columns.unblocks(dv).astype(v.dtype),
            sinks=dsinks,
        ),
    )


attend.defvjp(_forward, _backward)


def _sink_blocks(call: "_BlockedCall", operands: Operands, sinks_H: Array) -> Array:
    """The sink of each query, f32 ``[N, B, G, X]``."""
    q, k = operands[:2]
    sinks = sinks_H.astype(sum_dtype(q))[None, :, None, None]
    each = jnp.broadcast_to(sinks, (*q.shape[:3], 1))
    return call.rows.blocks(each, k.shape[1])[..., 0]


class _BlockedCall(NamedTuple):
    """The operands of a call, cut into blocks."""

    rows: Tiling
    columns: Tiling
    queries: Queries
    keys: Keys
    mask: Mask

    @classmethod
    def of(cls, operands: Operands, options: Options) -> "_BlockedCall":
        q, k, v = operands[:3]
        batch, heads, length, _ = q.shape
        is_cpu = scope.device().platform == "cpu"
        most = MAX_SCORES_CPU if is_cpu else MAX_SCORES_ACCELERATOR
        on_device = -(-batch * heads // scope.num_splits())
        rows = Tiling(1, length, on_device, most)
        columns = Tiling(1, k.shape[2], on_device, most)
        query_rows, key_rows = (
            Rows.of(x, jnp.arange(x.length, dtype=jnp.int32), operands.segments)
            for x in (rows, columns)
        )
        window = operands.window
        if window is None:
            fixed = NO_WINDOW if options.window is None else options.window
            window = jnp.int32(fixed)
        return cls(
            rows,
            columns,
            Queries(rows.blocks(q, k.shape[1]), query_rows),
            Keys(columns.blocks(k), columns.blocks(v), key_rows),
            Mask(
                options.causal,
                window,
                options.scale,
                options.soft_cap,
                skips_by_segments=False,
                blocks=rows.count,
            ),
        )
