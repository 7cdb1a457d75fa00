# SPDX-License-Identifier: Apache-2.0
"""Ring buffers that a pipeline's device writes and reads by slot, and sums of trees.

A ring buffer is a tree of arrays with a leading dim of slots. The slot is known when
the program runs, not when it is traced: all devices of a pipeline execute one program.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from tessera.foundations.tree import Tree


def ring_buffer(like: Tree, slots: int) -> Tree:
    """Empty slots, at least one: a stage that receives nothing reads one, too."""

    def zeros(leaf: Any) -> Array:
        return jnp.zeros((max(slots, 1), *leaf.shape), leaf.dtype)

    return jax.tree.map(zeros, like)


def add(left: Tree, right: Tree) -> Tree:
    """The sum of two trees."""
    return jax.tree.map(jnp.add, left, right)


def row_of(array: Array, index: Array | int) -> Array:
    """One row of an array; of the only one without a slice."""
    if array.shape[0] == 1:
        return array[0]
    # Not array[index]: XLA cannot partition a gather inside a region that is manual
    # over some axes only.
    return jax.lax.dynamic_index_in_dim(array, index, 0, keepdims=False)


def add_to_row(array: Array, more: Array, *, index: Array) -> Array:
    """An array with something added to one of its rows."""
    if array.shape[0] == 1:
        return array + more[None]
    return jax.lax.dynamic_update_index_in_dim(
        array, row_of(array, index) + more, index, 0
    )


def read(buffer: Tree, slot: Array) -> Tree:
    """The value in a slot; for slot -1 a value that no caller uses."""
    return jax.tree.map(partial(row_of, index=jnp.maximum(slot, 0)), buffer)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stored:
    """An array in a slot of a ring buffer, of which a loop reads row after row.

    The loop would slice a copy of the array that is made before it.

    Attributes:
      buffer: ``[slots, ...]``.
      slot: int32 scalar.
    """

    buffer: Array
    slot: Array

    def read(self) -> Array:
        """The array."""
        return row_of(self.buffer, self.slot)

    def row(self, index: Array) -> Array:
        """One row of the array."""
        shape = self.buffer.shape[2:]
        first = [jnp.int32(i) for i in (self.slot, index, *(0 for _ in shape))]
        return jax.lax.dynamic_slice(self.buffer, first, (1, 1, *shape)).reshape(shape)


def stored(buffer: Tree, slot: Array) -> Tree:
    """The value in a slot, for loops over its rows; for slot -1 as for ``read``."""
    return jax.tree.map(partial(Stored, slot=jnp.maximum(slot, 0)), buffer)


def write(buffer: Tree, value: Tree, slot: Array) -> Tree:
    """The buffer with a value in a slot."""

    def written(old: Array, new: Array) -> Array:
        return jax.lax.dynamic_update_index_in_dim(old, new, slot, 0)

    return jax.tree.map(written, buffer, value)


def store(buffer: Tree, value: Tree, slot: Array) -> Tree:
    """The buffer with a value in a slot; unchanged for slot -1."""

    def write(old: Array, new: Array) -> Array:
        index = jnp.maximum(slot, 0)
        row = jnp.where(slot >= 0, new, row_of(old, index))
        return jax.lax.dynamic_update_index_in_dim(old, row, index, 0)

    return jax.tree.map(write, buffer, value)
