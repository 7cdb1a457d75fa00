# SPDX-License-Identifier: Apache-2.0
"""All-to-all attention: devices exchange their part of the sequence for heads.

Before, each device has all heads of its tokens; in between, all tokens of its heads.
Four exchanges forward (queries, keys, values, output) and four backward, each of 1 / n
of the bytes of the whole array, whatever n is.

Source: S. A. Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array, lax

from tessera.ops.attention.blockwise import (
    Keys,
    OutputGradients,
    Queries,
    attend_blocks,
    block_gradients,
    delta_of,
)
from tessera.ops.attention.context_parallel_residuals import Residuals, mask_of
from tessera.ops.attention.tiling import Rows, Tiling
from tessera.ops.attention.zigzag import ContextSharding


@dataclass(frozen=True)
class AllToAll:
    """Attention over an axis that splits the heads instead of the sequence.

    The axis's size divides the query heads. It divides the key/value heads, or they
    divide it: then each device gets a copy of the one that its queries attend to.
    """

    sharding: ContextSharding

    def forward(
        self, q: Array, k: Array, v: Array, segments: Array | None, window: Array
    ) -> tuple[Array, Residuals]:
        """The output of this device's queries; see ``KeyExchange.forward``."""
        q_whole, k_whole, v_whole = (self._to_heads(x) for x in (q, k, v))
        queries, keys, tiling = self._blocks(q_whole, k_whole, v_whole, segments)
        mask = mask_of(self.sharding, window, tiling.count)
        out, lse = attend_blocks(queries, keys, mask)
        # Copied heads are not saved: they are larger than the operands.
        is_copied = k_whole.size > k.size
        return self._to_sequence(tiling.unheads(out).astype(q.dtype)), Residuals(
            q_whole.reshape(q.shape),
            k if is_copied else k_whole.reshape(k.shape),
            v if is_copied else v_whole.reshape(v.shape),
            tiling.unheads(lse[..., None]).reshape(q.shape[:-1]),
        )

    def backward(
        self,
        residuals: Residuals,
        out: Array,
        dout: Array,
        segments: Array | None,
        window: Array,
    ) -> tuple[Array, Array, Array]:
        """Gradients of queries, keys and values; see ``KeyExchange.backward``."""
        q, k, v, lse = residuals
        is_copied = self._copies(k.shape[2]) > 1
        k_whole, v_whole = (
            self._to_heads(x) if is_copied else self._as_whole(x) for x in (k, v)
        )
        queries, keys, tiling = self._blocks(
            self._as_whole(q), k_whole, v_whole, segments
        )
        outputs = OutputGradients.of(
            tiling,
            k_whole.shape[2],
            self._to_heads(dout),
            self._as_whole(lse[..., None])[..., 0],
            self._exchange(delta_of(out, dout)[..., None])[..., 0],
        )
        mask = mask_of(self.sharding, window, tiling.count)
        gradients = block_gradients(queries, outputs, keys, mask)
        dq, dk, dv = map(tiling.unheads, gradients)
        return (
            self._to_sequence(dq.astype(q.dtype)),
            self._sum_copies(dk, k),
            self._sum_copies(dv, v),
        )

    def _copies(self, heads: int) -> int:
        """How many devices need each key/value head."""
        return max(self.sharding.arrangement.size // heads, 1)

    def _to_heads(self, x_BSHK: Array) -> Array:
        """All tokens of this device's heads, for matmuls only."""
        wire = self.sharding.wire
        return self._exchange(x_BSHK.astype(wire or x_BSHK.dtype)).astype(x_BSHK.dtype)

    def _exchange(self, x_BSHK: Array) -> Array:
        copies = self._copies(x_BSHK.shape[2])
        return lax.all_to_all(
            jnp.repeat(x_BSHK, copies, axis=2) if copies > 1 else x_BSHK,
            self.sharding.axis,
            split_axis=2,
            concat_axis=1,
            tiled=True,
        )

    def _to_sequence(self, x_BTHK: Array) -> Array:
        """All heads of this device's tokens."""
        return lax.all_to_all(
            x_BTHK, self.sharding.axis, split_axis=1, concat_axis=2, tiled=True
        )

    def _as_whole(self, x_BSHK: Array) -> Array:
        """All tokens of this device's heads, from the shape of the residuals."""
        size = self.sharding.arrangement.size
        batch, length, heads, width = x_BSHK.shape
        return x_BSHK.reshape(batch, length * size, heads // size, width)

    def _sum_copies(self, whole: Array, operand: Array) -> Array:
        """The gradient of an operand's heads from those of their copies."""
        copied = self._to_sequence(whole.astype(operand.dtype))
        copies = self._copies(operand.shape[2])
        return copied.reshape(*operand.shape[:3], copies, -1).sum(axis=3)

    def _blocks(
        self, q: Array, k: Array, v: Array, segments: Array | None
    ) -> tuple[Queries, Keys, Tiling]:
        arrangement, length = self.sharding.arrangement, q.shape[1]
        tiling = Tiling(arrangement.size * arrangement.runs, length)
        rows = Rows.of(tiling, jnp.asarray(arrangement.positions(length)), segments)
        queries = Queries(tiling.heads(q, k.shape[2]), rows)
        return queries, Keys(tiling.heads(k), tiling.heads(v), rows), tiling
