# SPDX-License-Identifier: Apache-2.0
"""All-gather attention: every device has all keys and values while it attends.

It sends what the ring sends and holds n times the keys, of one layer at a time: the
backward pass gathers them again, and reduce-scatters their gradients. It is the ring's
substitute inside a pipeline's stages, where other devices may be in another branch of
the program: XLA's collective permutes wait for all devices of the mesh, all-gathers for
those of the axis.

Source: A. Dubey et al., The Llama 3 Herd of Models, arXiv 2407.21783, section 3.3.2.
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
    zeros_like,
)
from tessera.ops.attention.context_residuals import Kept
from tessera.ops.attention.zigzag import Spread


@dataclass(frozen=True)
class Gather:
    """Attention over an axis that gathers keys and values."""

    spread: Spread

    def forward(
        self, q: Array, k: Array, v: Array, segments: Array | None, window: Array
    ) -> tuple[Array, Kept]:
        """What the queries of this device read; see ``Form.forward``."""
        queries, tiling = self._queries(q, k.shape[2], segments)
        keys, _ = self._keys(k, v, segments)
        mask = Mask(self.spread.causal, window)
        read, log_total = fold(Softmax.before(queries), queries, keys, mask).result()
        kept = Kept(q, k, v, tiling.unheads(log_total[..., None])[..., 0])
        return tiling.unheads(read).astype(q.dtype), kept

    def backward(
        self,
        kept: Kept,
        out: Array,
        gradient: Array,
        segments: Array | None,
        window: Array,
    ) -> tuple[Array, Array, Array]:
        """Gradients of queries, keys and values; see ``Form.backward``."""
        groups = kept.k.shape[2]
        queries, tiling = self._queries(kept.q, groups, segments)
        keys, whole = self._keys(kept.k, kept.v, segments)
        saved = Saved.of(tiling, groups, kept.log_total, out, gradient)
        zeros = zeros_like(queries.q), zeros_like(keys.k), zeros_like(keys.v)
        mask = Mask(self.spread.causal, window)
        of_q, of_k, of_v = fold_gradients(zeros, queries, saved, keys, mask)
        return (
            tiling.unheads(of_q).astype(kept.q.dtype),
            self._own(whole.unheads(of_k)).astype(kept.k.dtype),
            self._own(whole.unheads(of_v)).astype(kept.v.dtype),
        )

    def _queries(
        self, q: Array, groups: int, segments: Array | None
    ) -> tuple[Queries, Tiling]:
        arrangement, length = self.spread.arrangement, q.shape[1]
        tiling = Tiling(arrangement.runs, length)
        first = lax.axis_index(self.spread.axis) * length
        places = jnp.asarray(arrangement.places(arrangement.size * length))
        at = Rows.of(
            tiling,
            lax.dynamic_slice_in_dim(places, first, length),
            None
            if segments is None
            else lax.dynamic_slice_in_dim(segments, first, length, axis=1),
        )
        return Queries(tiling.heads(q, groups), at), tiling

    def _keys(self, k: Array, v: Array, segments: Array | None) -> tuple[Keys, Tiling]:
        arrangement = self.spread.arrangement
        length = arrangement.size * k.shape[1]
        tiling = Tiling(arrangement.size * arrangement.runs, length)
        at = Rows.of(tiling, jnp.asarray(arrangement.places(length)), segments)
        k, v = (tiling.heads(self._whole(x)) for x in (k, v))
        return Keys(k, v, at), tiling

    def _whole(self, x: Array) -> Array:
        wire = x if self.spread.wire is None else x.astype(self.spread.wire)
        whole = lax.all_gather(wire, self.spread.axis, axis=1, tiled=True)
        return whole.astype(x.dtype)

    def _own(self, of_whole: Array) -> Array:
        return lax.psum_scatter(
            of_whole, self.spread.axis, scatter_dimension=1, tiled=True
        )
