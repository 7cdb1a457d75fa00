# SPDX-License-Identifier: Apache-2.0
"""What the variants of context-parallel attention share: interface and residuals.

The variants save residuals of the same shapes, so that a layer may choose between two
of them at run time without saving the residuals of both.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array

from tessera.ops.attention.blockwise import (
    Keys,
    Mask,
    OutputGradients,
    Queries,
    attend_blocks,
    block_gradients,
)
from tessera.ops.attention.tiling import Rows, Tiling
from tessera.ops.attention.zigzag import ContextSharding


class Residuals(NamedTuple):
    """What the backward pass needs. A variant may store the elements in its own order.

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


class ContextVariant(Protocol):
    """One way to compute attention over sequences that are split over an axis."""

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
        ...

    def backward(
        self,
        residuals: Residuals,
        out: Array,
        dout: Array,
        segments: Array | None,
        window: Array,
    ) -> tuple[Array, Array, Array]:
        """Gradients of ``q``, ``k`` and ``v``, from the output and its gradient."""
        ...


@dataclass(frozen=True)
class CollectedKeys(ABC):
    """A variant in which each device collects the keys that its queries attend to."""

    sharding: ContextSharding

    @abstractmethod
    def collect(self, kv: Array) -> Array:
        """The keys and values: ``[2, B, S, G, K]`` to ``[2, B, T, G, K]``, linear."""

    @abstractmethod
    def blocks(
        self, length: int, segments: Array | None
    ) -> tuple[tuple[Tiling, Rows], tuple[Tiling, Rows]]:
        """How the queries, and the collected keys, are cut into blocks."""

    def collect_vjp(self, kv: Array) -> tuple[Array, Callable[[Array], Array]]:
        """:meth:`collect`, and its transpose for f32 gradients."""
        collected, pull_back = jax.vjp(self.collect, kv)

        def transpose(gradient: Array) -> Array:
            return pull_back(gradient.astype(kv.dtype))[0]

        return collected, transpose

    def forward(
        self, q: Array, k: Array, v: Array, segments: Array | None, window: Array
    ) -> tuple[Array, Residuals]:
        """The output of this device's queries; see ``ContextVariant.forward``."""
        (tiling, rows), (key_tiling, key_rows) = self.blocks(q.shape[1], segments)
        keys = _keys(key_tiling, self.collect(jnp.stack([k, v])), key_rows)
        queries = Queries(tiling.heads(q, k.shape[2]), rows)
        mask = Mask(self.sharding.causal, window)
        out, lse = attend_blocks(queries, keys, mask)
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
        """Gradients of queries, keys and values; see ``ContextVariant.backward``."""
        q, k, v, lse = residuals
        (tiling, rows), (key_tiling, key_rows) = self.blocks(q.shape[1], segments)
        collected, transpose = self.collect_vjp(jnp.stack([k, v]))
        keys = _keys(key_tiling, collected, key_rows)
        queries = Queries(tiling.heads(q, k.shape[2]), rows)
        outputs = OutputGradients.of(tiling, k.shape[2], lse, out, dout)
        mask = Mask(self.sharding.causal, window)
        dq, *dkv = block_gradients(queries, outputs, keys, mask)
        dk, dv = transpose(jnp.stack([key_tiling.unheads(x) for x in dkv]))
        return tiling.unheads(dq).astype(q.dtype), dk, dv


def _keys(tiling: Tiling, kv: Array, rows: Rows) -> Keys:
    return Keys(tiling.heads(kv[0]), tiling.heads(kv[1]), rows)
