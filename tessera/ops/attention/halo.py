# SPDX-License-Identifier: Apache-2.0
"""Halo exchange: attention in a window no longer than a chunk.

A query in a window of w tokens sees w - 1 back: keys of its own chunk and the last
w - 1 of the chunk before. That chunk is on a neighboring device, in zigzag order one on
either side, so each device sends w - 1 rows each way, however long the sequence is.
"""

from dataclasses import dataclass

import jax
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
    zeros_like,
)
from tessera.ops.attention.context_residuals import Kept
from tessera.ops.attention.zigzag import Spread


@dataclass(frozen=True)
class Halo:
    """Causal attention in a window, over an axis whose neighbors exchange halos.

    Attributes:
      spread: How sequences are spread; causal.
      rows: Rows of a halo, window - 1: at most those of a chunk.
    """

    spread: Spread
    rows: int

    def forward(
        self, q: Array, k: Array, v: Array, segments: Array | None, window: Array
    ) -> tuple[Array, Kept]:
        """What the queries of this device read; see ``Form.forward``."""
        chunks = _Chunks(self, q.shape[1], segments)
        queries, keys = chunks.blocks(q, *chunks.extend(jnp.stack([k, v])))
        mask = Mask(True, window)
        read, log_total = fold(Softmax.before(queries), queries, keys, mask).result()
        back = chunks.own.unheads
        kept = Kept(q, k, v, back(log_total[..., None])[..., 0])
        return back(read).astype(q.dtype), kept

    def backward(
        self,
        kept: Kept,
        out: Array,
        gradient: Array,
        segments: Array | None,
        window: Array,
    ) -> tuple[Array, Array, Array]:
        """Gradients of queries, keys and values; see ``Form.backward``."""
        chunks = _Chunks(self, kept.q.shape[1], segments)
        extended, pull_back = jax.vjp(chunks.extend, jnp.stack([kept.k, kept.v]))
        queries, keys = chunks.blocks(kept.q, *extended)
        groups = kept.k.shape[2]
        saved = Saved.of(chunks.own, groups, kept.log_total, out, gradient)
        zeros = zeros_like(queries.q), zeros_like(keys.k), zeros_like(keys.v)
        of_q, *of_kv = fold_gradients(zeros, queries, saved, keys, Mask(True, window))
        back = chunks.extended.unheads
        of_kv = jnp.stack([back(x).astype(kept.k.dtype) for x in of_kv])
        ((of_k, of_v),) = pull_back(of_kv)
        return chunks.own.unheads(of_q).astype(kept.q.dtype), of_k, of_v


class _Chunks:
    """The chunks of this device, each with the halo before it."""

    def __init__(self, form: Halo, length: int, segments: Array | None) -> None:
        self.spread, self.halo = form.spread, form.rows
        self.runs = form.spread.arrangement.runs
        self.rows = length // self.runs
        self.own = Tiling(self.runs, length)
        self.extended = Tiling(self.runs, self.runs * (self.halo + self.rows))
        self._segments = segments

    def extend(self, kv: Array) -> Array:
        """Keys and values with the halo before each chunk.

        ``[2, B, S, G, K]`` to ``[2, B, S + runs · halo, G, K]``, linear.
        """
        cut = kv.reshape(*kv.shape[:2], self.runs, self.rows, *kv.shape[3:])
        if not self.halo:
            return kv
        tails = cut[:, :, :, self.rows - self.halo :]
        joined = jnp.concatenate([self._received(tails), cut], axis=3)
        return joined.reshape(*kv.shape[:2], -1, *kv.shape[3:])

    def _received(self, tails: Array) -> Array:
        """The tail of the chunk before each; zeros where no other device has it."""
        wire = tails if self.spread.wire is None else tails.astype(self.spread.wire)
        # First chunks ascend with the rank, second ones descend.
        received = [
            self._from(wire[:, :, run], (-1, 1)[run]) for run in range(self.runs)
        ]
        return jnp.stack(received, axis=2).astype(tails.dtype)

    def _from(self, tail: Array, offset: int) -> Array:
        """The tail of the device that many ranks further on."""
        size, axis = self.spread.arrangement.size, self.spread.axis
        if self.spread.alone:
            ranks = lax.all_gather(tail, axis)
            rank = lax.axis_index(axis) + offset
            there = lax.dynamic_index_in_dim(ranks, rank % size, keepdims=False)
            return jnp.where((rank >= 0) & (rank < size), there, jnp.zeros_like(there))
        pairs = [(r, r - offset) for r in range(size) if 0 <= r - offset < size]
        return lax.ppermute(tail, axis, pairs)

    def blocks(self, q: Array, k: Array, v: Array) -> tuple[Queries, Keys]:
        """Blocks of the queries, and of the extended keys and values."""
        rank, size = lax.axis_index(self.spread.axis), self.spread.arrangement.size
        chunks = jnp.asarray(self.spread.arrangement.chunks)
        chunks = lax.dynamic_slice_in_dim(chunks, rank * self.runs, self.runs)
        first = chunks * self.rows
        place = first[:, None] + jnp.arange(-self.halo, self.rows, dtype=jnp.int32)
        own = self._at(self.own, place[:, self.halo :], first)
        if self.runs == 2:
            # The last device has two chunks in a row: the halo between is no token.
            gap = (rank == size - 1) & (place[1] < first[1])
            place = place.at[1].set(jnp.where(gap, -1, place[1]))
        at = self._at(self.extended, place, first - self.halo)
        heads = self.extended.heads
        queries = Queries(self.own.heads(q, k.shape[2]), own)
        return queries, Keys(heads(k), heads(v), at)

    def _at(self, tiling: Tiling, place: Array, first: Array) -> Rows:
        """Rows at places ``[runs, rows]``; those of a run count up from ``first``."""
        if self._segments is None:
            return Rows.of(tiling, place.reshape(-1), None)
        line = self.spread.arrangement.undo(self._segments, dim=1)
        # Before the first token is some segment, in which no query sees anything.
        line = jnp.pad(line, ((0, 0), (self.halo, 0)))
        parts = [
            lax.dynamic_slice_in_dim(
                line, first[run] + self.halo, place.shape[1], axis=1
            )
            for run in range(self.runs)
        ]
        return Rows.of(tiling, place.reshape(-1), jnp.concatenate(parts, axis=1))
