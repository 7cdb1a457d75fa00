# SPDX-License-Identifier: Apache-2.0
"""Attention by XLA, in memory linear in the length of the sequence.

Blockwise attention over whole sequences. The residuals are the operands, the output and
one number for each query; the backward pass recomputes the weights.

Source: T. Dao et al., FlashAttention, arXiv 2205.14135.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

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
    block_gradients,
    delta_of,
)
from tessera.ops.attention.context_parallel_variants import NO_WINDOW
from tessera.ops.attention.dispatch import Device, Operands, Options
from tessera.ops.attention.tiling import Rows, Tiling
from tessera.ops.rematerialization import ATTENTION_RESIDUALS


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
    call = _Call(operands, options)
    out, lse = attend_blocks(call.queries, call.keys, call.mask)
    out = call.rows.unblocks(out).astype(operands.q.dtype)
    out = checkpoint_name(out, ATTENTION_RESIDUALS)
    lse = checkpoint_name(lse, ATTENTION_RESIDUALS)
    return out, (operands, out, lse)


def _backward(options: Options, residuals: Any, dout: Array) -> Any:
    operands, out, lse = residuals
    call = _Call(operands, options)
    rows, groups = call.rows, call.groups
    delta = rows.blocks(delta_of(out, dout)[..., None], groups)[..., 0]
    outputs = OutputGradients(rows.blocks(dout, groups), lse, delta)
    dq, dk, dv = block_gradients(call.queries, outputs, call.keys, call.mask)
    q, k, v, *others = operands
    return (
        Operands(
            rows.unblocks(dq).astype(q.dtype),
            call.columns.unblocks(dk).astype(k.dtype),
            call.columns.unblocks(dv).astype(v.dtype),
            *(None for _ in others),
        ),
    )


attend.defvjp(_forward, _backward)


class _WholeBatch(Mask):
    """A mask that skips blocks by positions alone.

    Where a batch is sharded over devices, skipping by segments would need a collective
    for each pair of blocks.
    """

    def any_visible(self, queries: Rows, keys: Rows) -> Array:
        """False only where the positions mask every pair."""
        return super().any_visible(
            queries._replace(segment=None), keys._replace(segment=None)
        )


@dataclass(frozen=True)
class _Call:
    """The operands of a call, cut into blocks."""

    operands: Operands
    options: Options

    @property
    def groups(self) -> int:
        return self.operands.k.shape[1]

    @property
    def rows(self) -> Tiling:
        return self._tiling(self.operands.q)

    @property
    def columns(self) -> Tiling:
        return self._tiling(self.operands.k)

    def _tiling(self, x: Array) -> Tiling:
        batch, heads = self.operands.q.shape[:2]
        return Tiling(1, x.shape[2], batch * heads)

    @property
    def mask(self) -> Mask:
        options = self.options
        kind = Mask if self.operands.query_segments is None else _WholeBatch
        window = self.operands.window
        if window is None:
            fixed = NO_WINDOW if options.window is None else options.window
            window = jnp.int32(fixed)
        return kind(options.causal, window, options.scale, options.soft_cap)

    @property
    def queries(self) -> Queries:
        operands, rows = self.operands, self.rows
        first = jnp.int32(self.options.offset)
        if operands.offset is not None:
            first = first + operands.offset
        positions = jnp.arange(rows.length, dtype=jnp.int32) + first
        query_rows = Rows.of(rows, positions, operands.query_segments)
        return Queries(rows.blocks(operands.q, self.groups), query_rows)

    @property
    def keys(self) -> Keys:
        operands, columns = self.operands, self.columns
        positions = jnp.arange(columns.length, dtype=jnp.int32)
        key_rows = Rows.of(columns, positions, operands.key_segments)
        return Keys(columns.blocks(operands.k), columns.blocks(operands.v), key_rows)
