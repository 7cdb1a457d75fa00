# SPDX-License-Identifier: Apache-2.0
"""Ring attention: queries stay, keys and values go round.

Each device folds the keys that it holds into the state of its own queries while it
passes them on. After n - 1 hops every query has met every key, and no device has ever
held more than two devices' keys. The backward pass goes round once more instead of
keeping what came by; the gradients of keys and values travel with them, and home.

Source: H. Liu, M. Zaharia, P. Abbeel, arXiv 2310.01889.
"""

from dataclasses import dataclass
from typing import Any

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
    varying_as,
    zeros_like,
)
from tessera.ops.attention.context_residuals import Kept
from tessera.ops.attention.zigzag import Spread


@dataclass(frozen=True)
class Ring:
    """Attention over an axis round which keys and values go.

    Sends, for each device, n - 1 times its keys and values forward; as much again
    backward, and n times their f32 gradients.
    """

    spread: Spread

    def forward(
        self, q: Array, k: Array, v: Array, segments: Array | None, window: Array
    ) -> tuple[Array, Kept]:
        """What the queries of this device read; see ``Form.forward``."""
        circle = _Circle(self.spread, q.shape[1], segments)
        mask = Mask(self.spread.causal, window)
        queries = Queries(circle.tiling.heads(q, k.shape[2]), circle.rows(0))

        def fold_in(state: Softmax, wire: Array, hop: Any) -> Softmax:
            return fold(state, queries, circle.keys(wire, hop, q.dtype), mask)

        def pass_on(carry: Any, hop: Array) -> Any:
            wire, state = carry
            return (circle.next(wire), fold_in(state, wire, hop)), None

        carry = circle.wire(k, v), Softmax.before(queries)
        (wire, state), _ = lax.scan(pass_on, carry, circle.hops)
        read, log_total = fold_in(state, wire, circle.last_hop).result()
        out = circle.tiling.unheads(read).astype(q.dtype)
        return out, Kept(q, k, v, circle.tiling.unheads(log_total[..., None])[..., 0])

    def backward(
        self,
        kept: Kept,
        out: Array,
        gradient: Array,
        segments: Array | None,
        window: Array,
    ) -> tuple[Array, Array, Array]:
        """Gradients of queries, keys and values; see ``Form.backward``."""
        circle = _Circle(self.spread, kept.q.shape[1], segments)
        mask, groups = Mask(self.spread.causal, window), kept.k.shape[2]
        tiling, dtype = circle.tiling, kept.q.dtype
        queries = Queries(tiling.heads(kept.q, groups), circle.rows(0))
        saved = Saved.of(tiling, groups, kept.log_total, out, gradient)

        def add(of_queries: Array, of_wire: Array, wire: Array, hop: Any) -> Any:
            keys = circle.keys(wire, hop, dtype)
            of_queries, of_keys, of_values = fold_gradients(
                (of_queries, of_wire[0], of_wire[1]), queries, saved, keys, mask
            )
            return of_queries, jnp.stack([of_keys, of_values])

        def pass_on(carry: Any, hop: Array) -> Any:
            wire, of_queries, of_wire = carry
            of_queries, of_wire = add(of_queries, of_wire, wire, hop)
            return (circle.next(wire), of_queries, circle.next(of_wire)), None

        wire = circle.wire(kept.k, kept.v)
        carry = wire, zeros_like(queries.q), zeros_like(wire)
        (wire, of_queries, of_wire), _ = lax.scan(pass_on, carry, circle.hops)
        of_queries, of_wire = add(of_queries, of_wire, wire, circle.last_hop)
        of_keys, of_values = circle.next(of_wire)
        return (
            tiling.unheads(of_queries).astype(dtype),
            tiling.unheads(of_keys).astype(kept.k.dtype),
            tiling.unheads(of_values).astype(kept.v.dtype),
        )


class _Circle:
    """The devices of an axis in a circle, seen from this one.

    After ``hop`` hops it has the keys of the device that many ranks before it.
    """

    def __init__(self, spread: Spread, length: int, segments: Array | None) -> None:
        self.axis, self.size = spread.axis, spread.arrangement.size
        self.tiling = Tiling(spread.arrangement.runs, length)
        self._places = jnp.asarray(spread.arrangement.places(self.size * length))
        self._segments, self._dtype = segments, spread.wire

    @property
    def hops(self) -> Array:
        """Numbers of the hops after which the keys are passed on."""
        return jnp.arange(self.size - 1, dtype=jnp.int32)

    @property
    def last_hop(self) -> int:
        """Number of the hop after which they are not."""
        return self.size - 1

    def wire(self, k: Array, v: Array) -> Array:
        """Blocks of keys and values as they travel: ``[2, M, B, G, T, K]``."""
        blocks = jnp.stack([self.tiling.heads(k), self.tiling.heads(v)])
        return blocks if self._dtype is None else blocks.astype(self._dtype)

    def keys(self, wire: Array, hop: Any, dtype: Any) -> Keys:
        """What has arrived after some hops."""
        return Keys(wire[0].astype(dtype), wire[1].astype(dtype), self.rows(hop))

    def rows(self, hop: Any) -> Rows:
        """Where they lie."""
        home = (lax.axis_index(self.axis) - hop) % self.size * self.tiling.length
        place = lax.dynamic_slice_in_dim(self._places, home, self.tiling.length)
        if self._segments is None:
            return Rows.of(self.tiling, place, None)
        segment = lax.dynamic_slice_in_dim(
            self._segments, home, self.tiling.length, axis=1
        )
        return Rows.of(self.tiling, varying_as(segment, place), segment)

    def next(self, wire: Array) -> Array:
        """What the device before this one has."""
        ring = [(rank, (rank + 1) % self.size) for rank in range(self.size)]
        return lax.ppermute(wire, self.axis, ring)
