# SPDX-License-Identifier: Apache-2.0
"""All-to-all attention: the sequence is exchanged for heads, and back.

Before: each device has all heads of its tokens. Between: all tokens of its heads, so it
attends as if alone. Four exchanges forward (queries, keys, values, what was read) and
four backward, of 1 / n of the bytes of the whole each, whatever n is.

Source: S. A. Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array, lax

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
from tessera.ops.attention.context_residuals import Kept
from tessera.ops.attention.zigzag import Spread


@dataclass(frozen=True)
class AllToAll:
    """Attention over an axis that takes the heads from the sequence.

    The axis's size divides the query heads. It divides the key/value heads, or they
    divide it: then each device gets a copy of the one that its queries read.
    """

    spread: Spread

    def forward(
        self, q: Array, k: Array, v: Array, segments: Array | None, window: Array
    ) -> tuple[Array, Kept]:
        """What the queries of this device read; see ``Form.forward``."""
        q_whole, k_whole, v_whole = (self._to_heads(x) for x in (q, k, v))
        queries, keys, tiling = self._blocks(q_whole, k_whole, v_whole, segments)
        mask = Mask(self.spread.causal, window)
        read, log_total = fold(Softmax.before(queries), queries, keys, mask).result()
        out = self._to_sequence(tiling.unheads(read).astype(q.dtype))
        # Copied heads are not kept: they are more than there were.
        copied = k_whole.size > k.size
        return out, Kept(
            q_whole.reshape(q.shape),
            k if copied else k_whole.reshape(k.shape),
            v if copied else v_whole.reshape(v.shape),
            tiling.unheads(log_total[..., None]).reshape(q.shape[:-1]),
        )

    def backward(
        self,
        kept: Kept,
        out: Array,
        gradient: Array,
        segments: Array | None,
        window: Array,
    ) -> tuple[Array, Array, Array]:
        """Gradients of queries, keys and values; see ``Form.backward``."""
        copied = self._copies(kept.k.shape[2]) > 1
        q_whole = self._as_whole(kept.q)
        k_whole, v_whole = (
            self._to_heads(x) if copied else self._as_whole(x) for x in (kept.k, kept.v)
        )
        queries, keys, tiling = self._blocks(q_whole, k_whole, v_whole, segments)
        groups = k_whole.shape[2]
        share = self._exchanged(share_of(out, gradient)[..., None])
        log_total = self._as_whole(kept.log_total[..., None])
        saved = Saved(
            tiling.heads(self._to_heads(gradient), groups),
            tiling.heads(log_total, groups)[..., 0],
            tiling.heads(share, groups)[..., 0],
        )
        zeros = zeros_like(queries.q), zeros_like(keys.k), zeros_like(keys.v)
        mask = Mask(self.spread.causal, window)
        by_blocks = fold_gradients(zeros, queries, saved, keys, mask)
        of_q, of_k, of_v = map(tiling.unheads, by_blocks)
        return (
            self._to_sequence(of_q.astype(kept.q.dtype)),
            self._summed_copies(of_k, kept.k),
            self._summed_copies(of_v, kept.v),
        )

    def _copies(self, heads: int) -> int:
        """How often a key/value head is needed."""
        return max(self.spread.arrangement.size // heads, 1)

    def _to_heads(self, x_BSHK: Array) -> Array:
        """All tokens of this device's heads, for matmuls alone."""
        wire = x_BSHK if self.spread.wire is None else x_BSHK.astype(self.spread.wire)
        return self._exchanged(wire).astype(x_BSHK.dtype)

    def _exchanged(self, x_BSHK: Array) -> Array:
        copies = self._copies(x_BSHK.shape[2])
        return lax.all_to_all(
            jnp.repeat(x_BSHK, copies, axis=2) if copies > 1 else x_BSHK,
            self.spread.axis,
            split_axis=2,
            concat_axis=1,
            tiled=True,
        )

    def _to_sequence(self, x_BTHK: Array) -> Array:
        """All heads of this device's tokens."""
        return lax.all_to_all(
            x_BTHK, self.spread.axis, split_axis=1, concat_axis=2, tiled=True
        )

    def _as_whole(self, x_BSHK: Array) -> Array:
        """All tokens of this device's heads, from the shape they were kept in."""
        size = self.spread.arrangement.size
        batch, length, heads, width = x_BSHK.shape
        return x_BSHK.reshape(batch, length * size, heads // size, width)

    def _summed_copies(self, whole: Array, given: Array) -> Array:
        """Gradient of the given heads from those of their copies."""
        there = self._to_sequence(whole.astype(given.dtype))
        copies = self._copies(given.shape[2])
        return there.reshape(*given.shape[:3], copies, -1).sum(axis=3)

    def _blocks(
        self, q: Array, k: Array, v: Array, segments: Array | None
    ) -> tuple[Queries, Keys, Tiling]:
        arrangement, length = self.spread.arrangement, q.shape[1]
        tiling = Tiling(arrangement.size * arrangement.runs, length)
        at = Rows.of(tiling, jnp.asarray(arrangement.places(length)), segments)
        queries = Queries(tiling.heads(q, k.shape[2]), at)
        return queries, Keys(tiling.heads(k), tiling.heads(v), at), tiling
