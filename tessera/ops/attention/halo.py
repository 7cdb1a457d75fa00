# SPDX-License-Identifier: Apache-2.0
"""Context-parallel attention that collects keys first: all-gather and halo exchange."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from tessera.ops.attention.context_parallel_residuals import KeyExchange
from tessera.ops.attention.tiling import Rows, Tiling


@dataclass(frozen=True)
class Gather(KeyExchange):
    """All-gather attention: every device has all keys and values while it attends.

    It sends what the ring sends and holds n times the keys, of one layer at a time: the
    backward pass gathers them again, and reduce-scatters their gradients. It replaces
    the ring inside the stages of a pipeline, where other devices may be in another
    branch of the program: XLA's collective permutes wait for all devices of the mesh,
    all-gathers only for those of the axis.

    Source: A. Dubey et al., The Llama 3 Herd of Models, arXiv 2407.21783, 3.3.2.
    """

    def collect(self, kv: Array) -> Array:
        """Keys and values of all devices."""
        wire = kv if self.sharding.wire is None else kv.astype(self.sharding.wire)
        collected = lax.all_gather(wire, self.sharding.axis, axis=2, tiled=True)
        return collected.astype(kv.dtype)

    def collect_vjp(self, kv: Array) -> tuple[Array, Callable[[Array], Array]]:
        """:meth:`collect`, and its transpose, which sums in f32."""

        def transpose(gradient: Array) -> Array:
            own = lax.psum_scatter(
                gradient, self.sharding.axis, scatter_dimension=2, tiled=True
            )
            return own.astype(kv.dtype)

        return self.collect(kv), transpose

    def blocks(
        self, length: int, segments: Array | None
    ) -> tuple[tuple[Tiling, Rows], tuple[Tiling, Callable[[Any], Rows]]]:
        """How the queries of this device, and the keys of all, are cut into blocks."""
        arrangement = self.sharding.arrangement
        own = Tiling(arrangement.runs, length)
        every = Tiling(arrangement.size * arrangement.runs, arrangement.size * length)
        positions = jnp.asarray(arrangement.positions(every.length))
        rows = self.rows_of_device(own, 0, segments)
        keys = Rows.of(every, positions, segments)
        return (own, rows), (every, lambda _: keys)


@dataclass(frozen=True)
class Halo(KeyExchange):
    """Causal attention in a window no longer than a chunk, by halo exchange.

    A query in a window of w tokens attends to w - 1 before it: keys of its own chunk
    and the last w - 1 of the chunk before. That chunk is on a neighboring device, in
    zigzag order one on either side, so each device sends w - 1 rows each way, however
    long the sequence is.

    Attributes:
      halo: Rows of a halo, window - 1: at most those of a chunk.
    """

    halo: int

    def collect(self, kv: Array) -> Array:
        """Keys and values, each chunk preceded by its halo."""
        if not self.halo:
            return kv
        runs = self.sharding.arrangement.runs
        rows = kv.shape[2] // runs
        chunks = kv.reshape(*kv.shape[:2], runs, rows, *kv.shape[3:])
        tails = chunks[:, :, :, rows - self.halo :]
        wire = tails if self.sharding.wire is None else tails.astype(self.sharding.wire)
        # In zigzag order first chunks ascend with the rank, second ones descend.
        received = [self._from(wire[:, :, run], (-1, 1)[run]) for run in range(runs)]
        halos = jnp.stack(received, axis=2).astype(tails.dtype)
        extended = jnp.concatenate([halos, chunks], axis=3)
        return extended.reshape(*kv.shape[:2], -1, *kv.shape[3:])

    def whole_blocks(self, tiling: Tiling) -> int | None:
        """Unknown: keys are cut in another way than queries."""
        return None

    def _from(self, tail: Array, offset: int) -> Array:
        """The tail of the device at rank + offset; zeros where there is none."""
        size, axis = self.sharding.arrangement.size, self.sharding.axis
        if self.sharding.divergent:
            tails = lax.all_gather(tail, axis)
            rank = lax.axis_index(axis) + offset
            received = lax.dynamic_index_in_dim(tails, rank % size, keepdims=False)
            exists = (rank >= 0) & (rank < size)
            return jnp.where(exists, received, jnp.zeros_like(received))
        pairs = [(r, r - offset) for r in range(size) if 0 <= r - offset < size]
        return lax.ppermute(tail, axis, pairs)

    def blocks(
        self, length: int, segments: Array | None
    ) -> tuple[tuple[Tiling, Rows], tuple[Tiling, Callable[[Any], Rows]]]:
        """How the queries, and the extended keys, are cut into blocks."""
        arrangement = self.sharding.arrangement
        runs, rank = arrangement.runs, lax.axis_index(self.sharding.axis)
        rows = length // runs
        own, extended = Tiling(runs, length), Tiling(runs, runs * (self.halo + rows))
        chunks = jnp.asarray(arrangement.chunks)
        first = lax.dynamic_slice_in_dim(chunks, rank * runs, runs) * rows
        positions = first[:, None] + jnp.arange(-self.halo, rows, dtype=jnp.int32)
        queries = self._rows(own, positions[:, self.halo :], first, segments)
        if runs == 2:
            # The last device has two consecutive chunks: the second needs no halo.
            is_last = (rank == arrangement.size - 1) & (positions[1] < first[1])
            positions = positions.at[1].set(jnp.where(is_last, -1, positions[1]))
        keys = self._rows(extended, positions, first - self.halo, segments)
        return (own, queries), (extended, lambda _: keys)

    def _rows(
        self, tiling: Tiling, positions: Array, first: Array, segments: Array | None
    ) -> Rows:
        """Rows at positions ``[runs, rows]``; those of a run count from ``first``."""
        if segments is None:
            return Rows.of(tiling, positions.reshape(-1), None)
        in_order = self.sharding.arrangement.undo(segments, dim=1)
        # Before the first token, any segment will do: these positions are masked.
        in_order = jnp.pad(in_order, ((0, 0), (self.halo, 0)))
        runs = [
            lax.dynamic_slice_in_dim(
                in_order, first[run] + self.halo, positions.shape[1], axis=1
            )
            for run in range(tiling.runs)
        ]
        return Rows.of(tiling, positions.reshape(-1), jnp.concatenate(runs, axis=1))
