# SPDX-License-Identifier: Apache-2.0
"""Attention by XLA, whose memory grows with the sequence, not with its square.

The blocks of ``blockwise`` on whole sequences. What is kept for the backward pass is
the operands, the result and one number for each query; the weights are computed again.

Source: T. Dao et al., FlashAttention, arXiv 2205.14135.
"""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from tessera.ops.attention.attention_call import Operands, Setting
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
    share_of,
    zeros_like,
)
from tessera.ops.attention.context_variants import NO_WINDOW
from tessera.ops.checkpointing import ATTENTION_RESIDUALS

if TYPE_CHECKING:
    from tessera.ops.attention.dispatch import Device


def why_not(operands: Operands, setting: Setting, device: "Device") -> str | None:
    """It serves every call."""
    del operands, setting, device
    return None


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def attend(operands: Operands, setting: Setting) -> Array:
    """What the queries read: ``[B, H, S, D]``."""
    return _forward(operands, setting)[0]


def _forward(operands: Operands, setting: Setting) -> Any:
    call = _Call(operands, setting)
    queries = call.queries
    state = fold(Softmax.before(queries), queries, call.keys, call.mask)
    read, log_total = state.result()
    out = call.rows.unblocks(read).astype(operands.q.dtype)
    out = checkpoint_name(out, ATTENTION_RESIDUALS)
    log_total = checkpoint_name(log_total, ATTENTION_RESIDUALS)
    return out, (operands, out, log_total)


def _backward(setting: Setting, kept: Any, gradient: Array) -> Any:
    operands, out, log_total = kept
    call = _Call(operands, setting)
    queries, keys, rows = call.queries, call.keys, call.rows
    share = rows.blocks(share_of(out, gradient)[..., None], call.groups)[..., 0]
    saved = Saved(rows.blocks(gradient, call.groups), log_total, share)
    zeros = zeros_like(queries.q), zeros_like(keys.k), zeros_like(keys.v)
    of_q, of_k, of_v = fold_gradients(zeros, queries, saved, keys, call.mask)
    q, k, v, *others = operands
    return (
        Operands(
            rows.unblocks(of_q).astype(q.dtype),
            call.columns.unblocks(of_k).astype(k.dtype),
            call.columns.unblocks(of_v).astype(v.dtype),
            *(None for _ in others),
        ),
    )


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


@dataclass(frozen=True)
class _Call:
    """A call, cut into blocks."""

    operands: Operands
    setting: Setting

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
        setting = self.setting
        kind = Mask if self.operands.query_segments is None else _WholeBatch
        window = self.operands.window
        if window is None:
            fixed = NO_WINDOW if setting.window is None else setting.window
            window = jnp.int32(fixed)
        return kind(setting.causal, window, setting.scale, setting.soft_cap)

    @property
    def queries(self) -> Queries:
        operands, rows = self.operands, self.rows
        first = jnp.int32(self.setting.offset)
        if operands.offset is not None:
            first = first + operands.offset
        places = jnp.arange(rows.length, dtype=jnp.int32) + first
        at = Rows.of(rows, places, operands.query_segments)
        return Queries(rows.blocks(operands.q, self.groups), at)

    @property
    def keys(self) -> Keys:
        operands, columns = self.operands, self.columns
        places = jnp.arange(columns.length, dtype=jnp.int32)
        at = Rows.of(columns, places, operands.key_segments)
        return Keys(columns.blocks(operands.k), columns.blocks(operands.v), at)
