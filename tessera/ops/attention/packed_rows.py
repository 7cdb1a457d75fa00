# SPDX-License-Identifier: Apache-2.0
"""Where the segments of packed rows are, as kernels for packed rows take them."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


class Segments(NamedTuple):
    """The segments of packed rows.

    Attributes:
      lengths: int32 ``[B, M]``: how many tokens each segment has, -1 after the last.
      offsets: int32 ``[B, M + 1]``: the index of its first token, -1 after the last.
      are_listed: bool scalar: whether these are all segments, each a run of tokens. If
        not, a kernel that has only these arrays would compute something else.
    """

    lengths: Array
    offsets: Array
    are_listed: Array

    @classmethod
    def of(cls, ids: Array, most: int) -> "Segments":
        """The first ``most`` runs of equal ids of each row.

        Args:
          ids: int32 ``[B, S]``.
          most: M, the number of segments that a row may have.

        Example:
          >>> found = Segments.of(jnp.asarray([[7, 7, 7, 2, 5, 5]]), 4)
          >>> found.lengths.tolist(), found.offsets.tolist()
          ([[3, 1, 2, -1]], [[0, 3, 4, -1, -1]])
        """
        batch, length = ids.shape
        before = jnp.concatenate([ids[:, :1] - 1, ids[:, :-1]], axis=1)
        is_start = ids != before
        index = jnp.arange(length, dtype=jnp.int32)
        starts = jnp.sort(jnp.where(is_start, index, length), axis=1)
        missing = most + 1 - length
        if missing > 0:
            starts = jnp.pad(starts, ((0, 0), (0, missing)), constant_values=length)
        starts = starts[:, : most + 1]
        lengths = starts[:, 1:] - starts[:, :-1]
        exists = starts[:, :-1] < length

        # A segment of two runs would be two segments.
        run_ids = jnp.take_along_axis(ids, jnp.minimum(starts[:, :-1], length - 1), 1)
        is_same = run_ids[:, :, None] == run_ids[:, None]
        is_other = ~jnp.eye(most, dtype=bool)
        repeats = is_same & is_other & exists[:, :, None] & exists[:, None]
        are_all = is_start.sum(axis=1) <= most
        end = jnp.full((batch, 1), -1, jnp.int32)
        offsets = jnp.where(exists, starts[:, :-1], -1)
        return cls(
            jnp.where(exists, lengths, -1).astype(jnp.int32),
            jnp.concatenate([offsets, end], axis=1).astype(jnp.int32),
            are_all.all() & ~repeats.any(),
        )
