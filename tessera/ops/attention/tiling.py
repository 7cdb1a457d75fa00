# SPDX-License-Identifier: Apache-2.0
"""How sequences are cut into blocks of rows, and the positions of these rows.

Dims: N blocks of queries, M of keys, B batch, G key/value heads, R query heads of each,
X = R · rows of a block of queries, T rows of a block of keys, K head_dim.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

# The f32 scores of a block of one head take 1 MiB.
MAX_ROWS = 512
# Blocks are smaller where the scores of all heads that a device has at once would be
# more than so many: 4 MiB stay in the caches of two cores, and an accelerator, which
# starts a dozen operations for each block, has 64 MiB to spare. They are also smaller
# where a sequence had fewer than eight: half of the scores on the diagonal of a causal
# mask are computed in vain.
MAX_SCORES_CPU = 2**20
MAX_SCORES_ACCELERATOR = 2**24
_MIN_BLOCKS = 8
_MIN_ROWS = 128


@dataclass(frozen=True)
class Tiling:
    """How the rows of a sequence are cut into blocks.

    Attributes:
      runs: Parts of the rows with consecutive positions; no block crosses their ends.
      length: The number of rows, a multiple of ``runs``.
      heads_at_once: Query heads times batch on one device: the more, the smaller the
        blocks.
      max_scores: The most scores of a block of all these heads.
    """

    runs: int
    length: int
    heads_at_once: int = 1
    max_scores: int = MAX_SCORES_CPU

    @property
    def max_rows(self) -> int:
        """The most rows that a block may have."""
        rows = MAX_ROWS
        while rows > _MIN_ROWS and (
            self.heads_at_once * rows**2 > self.max_scores
            or _MIN_BLOCKS * rows > self.length // self.runs
        ):
            rows //= 2
        return rows

    @property
    def blocks_per_run(self) -> int:
        """Blocks of one run."""
        return -(-(self.length // self.runs) // self.max_rows)

    @property
    def rows(self) -> int:
        """Rows of a block; the last block of a run may be padded."""
        return -(-(self.length // self.runs) // self.blocks_per_run)

    @property
    def count(self) -> int:
        """The number of blocks."""
        return self.runs * self.blocks_per_run

    def split(self, x: Array, dim: int = 0, fill: int = 0) -> Array:
        """Cut one dim into blocks, which become the leading dim."""
        run = self.length // self.runs
        x = x.reshape(*x.shape[:dim], self.runs, run, *x.shape[dim + 1 :])
        if padding := self.blocks_per_run * self.rows - run:
            widths = [(0, padding if d == dim + 1 else 0) for d in range(x.ndim)]
            x = jnp.pad(x, widths, constant_values=fill)
        x = x.reshape(*x.shape[:dim], self.count, self.rows, *x.shape[dim + 2 :])
        return jnp.moveaxis(x, dim, 0)

    def join(self, blocks: Array, dim: int = 0) -> Array:
        """Undo :meth:`split`."""
        x = jnp.moveaxis(blocks, 0, dim)
        padded = self.blocks_per_run * self.rows
        x = x.reshape(*x.shape[:dim], self.runs, padded, *x.shape[dim + 2 :])
        x = lax.slice_in_dim(x, 0, self.length // self.runs, axis=dim + 1)
        return x.reshape(*x.shape[:dim], self.length, *x.shape[dim + 2 :])

    def blocks(self, x_BHSK: Array, groups: int = 0) -> Array:
        """Blocks of ``[B, H, S, K]``: ``[N, B, H, rows, K]``.

        With ``groups``, the rows of the H / groups heads of a group are consecutive:
        ``[N, B, groups, X, K]``.
        """
        blocks = self.split(x_BHSK, dim=2)
        if not groups:
            return blocks
        count, batch, _, _, width = blocks.shape
        return blocks.reshape(count, batch, groups, -1, width)

    def unblocks(self, blocks: Array) -> Array:
        """Undo :meth:`blocks`, with groups or without."""
        count, batch, *_, width = blocks.shape
        return self.join(blocks.reshape(count, batch, -1, self.rows, width), dim=2)

    def heads(self, x_BSHK: Array, groups: int = 0) -> Array:
        """:meth:`blocks` of ``[B, S, H, K]``."""
        return self.blocks(jnp.swapaxes(x_BSHK, 1, 2), groups)

    def unheads(self, blocks: Array) -> Array:
        """Undo :meth:`heads`, with groups or without."""
        return jnp.swapaxes(self.unblocks(blocks), 1, 2)


class Rows(NamedTuple):
    """The positions and segments of the rows of some blocks.

    Attributes:
      position: int32 ``[N, rows]``, in the sequence; negative for padding.
      segment: int32 ``[N, B, rows]``, or None where a sequence is one segment.
    """

    position: Array
    segment: Array | None

    @classmethod
    def of(cls, tiling: Tiling, position: Array, segment: Array | None) -> "Rows":
        """Of positions ``[S]`` and segments ``[B, S]``."""
        blocks = None if segment is None else tiling.split(segment, dim=1)
        return cls(tiling.split(position, fill=-1), blocks)
