# SPDX-License-Identifier: Apache-2.0
"""What the variants of context-parallel attention share: interface and residuals.

The variants save residuals of the same shapes, so that a layer may choose between two
of them at run time without saving the residuals of both.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from tessera.ops.attention.blockwise import (
    Keys,
    Mask,
    OutputGradients,
    Queries,
    Softmax,
    delta_of,
    fold,
    fold_gradients,
    varying_as,
    zeros_like,
)
from tessera.ops.attention.tiling import Rows, Tiling
from tessera.ops.attention.zigzag import ContextSharding


class Residuals(NamedTuple):
    """What the backward pass needs.

    Attributes:
      q: ``[B, S, H, K]``.
      k: ``[B, S, G, K]``.
      v: ``[B, S, G, K]``.
      lse: f32 ``[B, S, H]``, the log of each query's sum of weights.
    """

    q: Array
    k: Array
    v: Array
    lse: Array


def mask_of(sharding: ContextSharding, window: Array, blocks: int | None) -> Mask:
    """The mask of a layer with this window; ``blocks`` as in ``Mask``."""
    return Mask(sharding.causal, window, soft_cap=sharding.soft_cap, blocks=blocks)


@dataclass(frozen=True)
class KeyExchange(ABC):
    """A variant whose queries stay on their device, which receives keys and values.

    They come at once (:meth:`collect`), or in parts that are passed on ``hops`` times.
    The gradients of keys and values are passed on with them.
    """

    sharding: ContextSharding

    @property
    def hops(self) -> int:
        """How often keys and values are passed on."""
        return 0

    @abstractmethod
    def collect(self, kv: Array) -> Array:
        """What a device holds before any hop: ``[2, B, S, G, K]`` to ``[2, B, T, …]``.

        It may have the dtype that is sent.
        """

    @abstractmethod
    def blocks(
        self, length: int, segments: Array | None
    ) -> tuple[tuple[Tiling, Rows], tuple[Tiling, Callable[[Any], Rows]]]:
        """How queries, and keys after some hops, are cut into blocks."""

    def whole_blocks(self, tiling: Tiling) -> int | None:
        """Blocks of the sequence of which this device's queries are so cut."""
        return tiling.count * self.sharding.arrangement.size

    def collect_vjp(self, kv: Array) -> tuple[Array, Callable[[Array], Array]]:
        """:meth:`collect`, and its transpose for wide gradients after all hops."""
        collected, pull_back = jax.vjp(self.collect, kv)

        def transpose(gradient: Array) -> Array:
            return pull_back(gradient.astype(collected.dtype))[0]

        return collected, transpose

    def send(self, x: Array) -> Array:
        """Pass an array on to another device, and receive one."""
        return x

    def forward(
        self, q: Array, k: Array, v: Array, segments: Array | None, window: Array
    ) -> tuple[Array, Residuals]:
        """The output of this device's queries, in an SPMD region.

        Args:
          q: ``[B, S, H, K]``, scaled; S are the tokens of this device.
          k: ``[B, S, G, K]``, G dividing H.
          v: ``[B, S, G, K]``.
          segments: int32 ``[B, n · S]``: of all tokens in the order of the devices.
          window: int32 scalar: how many positions back a query attends, including its
            own.

        Returns:
          ``[B, S, H, K]``, and the residuals for :meth:`backward`.
        """
        (tiling, rows), (key_tiling, key_rows) = self.blocks(q.shape[1], segments)
        mask = mask_of(self.sharding, window, self.whole_blocks(tiling))
        queries = Queries(tiling.heads(q, k.shape[2]), rows)

        def fold_in(state: Softmax, wire: Array, hop: Any) -> Softmax:
            k, v = wire.astype(q.dtype)
            return fold(state, queries, Keys(k, v, key_rows(hop)), mask)

        def one_hop(carry: Any, hop: Array) -> Any:
            wire, state = carry
            return (self.send(wire), fold_in(state, wire, hop)), None

        wire = _blocks_of(key_tiling, self.collect(jnp.stack([k, v])))
        wire, state = self._scan(one_hop, (wire, Softmax.initial(queries)))
        out, lse = fold_in(state, wire, self.hops).result()
        residuals = Residuals(q, k, v, tiling.unheads(lse[..., None])[..., 0])
        return tiling.unheads(out).astype(q.dtype), residuals

    def backward(
        self,
        residuals: Residuals,
        out: Array,
        dout: Array,
        segments: Array | None,
        window: Array,
    ) -> tuple[Array, Array, Array]:
        """Gradients of ``q``, ``k`` and ``v``, from the output and its gradient."""
        q, k, v, lse = residuals
        (tiling, rows), (key_tiling, key_rows) = self.blocks(q.shape[1], segments)
        mask = mask_of(self.sharding, window, self.whole_blocks(tiling))
        groups = k.shape[2]
        queries = Queries(tiling.heads(q, groups), rows)
        outputs = OutputGradients.of(tiling, groups, dout, lse, delta_of(out, dout))

        def add(dq: Array, dwire: Array, wire: Array, hop: Any) -> tuple[Array, Array]:
            k, v = wire.astype(q.dtype)
            keys, gradients = Keys(k, v, key_rows(hop)), (dq, dwire[0], dwire[1])
            dq, dk, dv = fold_gradients(gradients, queries, outputs, keys, mask)
            return dq, jnp.stack([dk, dv])

        def one_hop(carry: Any, hop: Array) -> Any:
            wire, dq, dwire = carry
            dq, dwire = add(dq, dwire, wire, hop)
            return (self.send(wire), dq, self.send(dwire)), None

        collected, transpose = self.collect_vjp(jnp.stack([k, v]))
        wire = _blocks_of(key_tiling, collected)
        carry = wire, zeros_like(queries.q), zeros_like(wire)
        wire, dq, dwire = self._scan(one_hop, carry)
        dq, dwire = add(dq, dwire, wire, self.hops)
        dk, dv = transpose(jnp.stack([key_tiling.unheads(x) for x in dwire]))
        return tiling.unheads(dq).astype(q.dtype), dk, dv

    def _scan(self, one_hop: Callable[[Any, Array], Any], carry: Any) -> Any:
        if not self.hops:
            return carry
        return lax.scan(one_hop, carry, jnp.arange(self.hops, dtype=jnp.int32))[0]

    def rows_of_device(
        self, tiling: Tiling, hops_before: Any, segments: Array | None
    ) -> Rows:
        """The rows of the device some ranks before this one."""
        arrangement, length = self.sharding.arrangement, tiling.length
        rank = lax.axis_index(self.sharding.axis) - hops_before
        first = rank % arrangement.size * length
        positions = jnp.asarray(arrangement.positions(arrangement.size * length))
        position = lax.dynamic_slice_in_dim(positions, first, length)
        if segments is None:
            return Rows.of(tiling, position, None)
        segment = lax.dynamic_slice_in_dim(segments, first, length, axis=1)
        return Rows.of(tiling, varying_as(segment, position), segment)


def _blocks_of(tiling: Tiling, kv: Array) -> Array:
    return jnp.stack([tiling.heads(x) for x in kv])
