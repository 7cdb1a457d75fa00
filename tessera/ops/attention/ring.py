# SPDX-License-Identifier: Apache-2.0
"""Ring attention: queries stay, keys and values are passed around the ring.

Each device folds the keys that it holds into the online softmax of its own queries
while it sends them on. After n - 1 hops every query has attended to every key, and no
device has ever held more than the keys of two devices. The backward pass sends them
around once more instead of saving them; the gradients of keys and values travel with
them, and one hop further, back to their device.

Source: H. Liu, M. Zaharia, P. Abbeel, arXiv 2310.01889.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from tessera.ops.attention.blockwise import (
    Keys,
    Mask,
    OutputGradients,
    Queries,
    Softmax,
    fold,
    fold_gradients,
    varying_as,
    zeros_like,
)
from tessera.ops.attention.context_parallel_residuals import Residuals
from tessera.ops.attention.tiling import Rows, Tiling
from tessera.ops.attention.zigzag import ContextSharding


@dataclass(frozen=True)
class Ring:
    """Attention over an axis around which keys and values are passed.

    Sends, for each device, n - 1 times its keys and values forward; as much again
    backward, and n times their f32 gradients.
    """

    sharding: ContextSharding

    def forward(
        self, q: Array, k: Array, v: Array, segments: Array | None, window: Array
    ) -> tuple[Array, Residuals]:
        """The output of this device's queries; see ``ContextVariant.forward``."""
        ring = _Ring(self.sharding, q.shape[1], segments)
        mask = Mask(self.sharding.causal, window)
        queries = Queries(ring.tiling.heads(q, k.shape[2]), ring.rows(0))

        def fold_in(state: Softmax, wire: Array, hop: Any) -> Softmax:
            return fold(state, queries, ring.keys(wire, hop, q.dtype), mask)

        def one_hop(carry: Any, hop: Array) -> Any:
            wire, state = carry
            return (ring.send(wire), fold_in(state, wire, hop)), None

        carry = ring.wire(k, v), Softmax.initial(queries)
        (wire, state), _ = lax.scan(one_hop, carry, ring.hops)
        out, lse = fold_in(state, wire, ring.last_hop).result()
        lse = ring.tiling.unheads(lse[..., None])[..., 0]
        return ring.tiling.unheads(out).astype(q.dtype), Residuals(q, k, v, lse)

    def backward(
        self,
        residuals: Residuals,
        out: Array,
        dout: Array,
        segments: Array | None,
        window: Array,
    ) -> tuple[Array, Array, Array]:
        """Gradients of queries, keys and values; see ``ContextVariant.backward``."""
        q, k, v, lse = residuals
        ring = _Ring(self.sharding, q.shape[1], segments)
        mask, groups = Mask(self.sharding.causal, window), k.shape[2]
        queries = Queries(ring.tiling.heads(q, groups), ring.rows(0))
        outputs = OutputGradients.of(ring.tiling, groups, lse, out, dout)

        def add(dq: Array, dwire: Array, wire: Array, hop: Any) -> Any:
            keys = ring.keys(wire, hop, q.dtype)
            dq, dk, dv = fold_gradients(
                (dq, dwire[0], dwire[1]), queries, outputs, keys, mask
            )
            return dq, jnp.stack([dk, dv])

        def one_hop(carry: Any, hop: Array) -> Any:
            wire, dq, dwire = carry
            dq, dwire = add(dq, dwire, wire, hop)
            return (ring.send(wire), dq, ring.send(dwire)), None

        wire = ring.wire(k, v)
        carry = wire, zeros_like(queries.q), zeros_like(wire)
        (wire, dq, dwire), _ = lax.scan(one_hop, carry, ring.hops)
        dq, dwire = add(dq, dwire, wire, ring.last_hop)
        gradients = dq, *ring.send(dwire)
        dq, dk, dv = (
            ring.tiling.unheads(gradient).astype(x.dtype)
            for gradient, x in zip(gradients, (q, k, v), strict=True)
        )
        return dq, dk, dv


class _Ring:
    """The devices of an axis as a ring, seen from this one.

    After ``hop`` hops it holds the keys of the device ``hop`` ranks before it.
    """

    def __init__(
        self, sharding: ContextSharding, length: int, segments: Array | None
    ) -> None:
        self.axis, self.size = sharding.axis, sharding.arrangement.size
        self.tiling = Tiling(sharding.arrangement.runs, length)
        self.hops = jnp.arange(self.size - 1, dtype=jnp.int32)
        self.last_hop = self.size - 1  # after which nothing is sent
        self._positions = jnp.asarray(
            sharding.arrangement.positions(self.size * length)
        )
        self._segments, self._dtype = segments, sharding.wire

    def wire(self, k: Array, v: Array) -> Array:
        """Blocks of keys and values as they are sent: ``[2, M, B, G, T, K]``."""
        blocks = jnp.stack([self.tiling.heads(k), self.tiling.heads(v)])
        return blocks if self._dtype is None else blocks.astype(self._dtype)

    def keys(self, wire: Array, hop: Any, dtype: Any) -> Keys:
        """The keys that this device holds after some hops."""
        return Keys(wire[0].astype(dtype), wire[1].astype(dtype), self.rows(hop))

    def rows(self, hop: Any) -> Rows:
        """The positions and segments of these keys."""
        length = self.tiling.length
        first = (lax.axis_index(self.axis) - hop) % self.size * length
        position = lax.dynamic_slice_in_dim(self._positions, first, length)
        if self._segments is None:
            return Rows.of(self.tiling, position, None)
        segment = lax.dynamic_slice_in_dim(self._segments, first, length, axis=1)
        return Rows.of(self.tiling, varying_as(segment, position), segment)

    def send(self, wire: Array) -> Array:
        """Pass an array on to the next device, and receive that of the previous one."""
        pairs = [(rank, (rank + 1) % self.size) for rank in range(self.size)]
        return lax.ppermute(wire, self.axis, pairs)
