# SPDX-License-Identifier: Apache-2.0
"""Arrays by number: rings of slots that a pipeline's device writes and reads.

A ring is a tree of arrays with a leading dim of slots. Which one is meant is known when
the program runs: every device of a pipeline executes the same program.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from tessera.tree import Tree


def zeros(like: Tree) -> Tree:
    """Zeros of the shapes and dtypes of a tree."""

    def zeros(leaf: Any) -> Array:
        return jnp.zeros(leaf.shape, leaf.dtype)

    return jax.tree.map(zeros, like)


def ring(like: Tree, slots: int) -> Tree:
    """Empty slots, at least one: also a stage that receives nothing reads its ring."""

    def zeros(leaf: Any) -> Array:
        return jnp.zeros((max(slots, 1), *leaf.shape), leaf.dtype)

    return jax.tree.map(zeros, like)


def added(left: Tree, right: Tree) -> Tree:
    """The sum of two trees."""
    return jax.tree.map(jnp.add, left, right)


def row_of(held: Array, index: Array | int) -> Array:
    """One row of an array; of the only one without a slice."""
    if held.shape[0] == 1:
        return held[0]
    # Not held[index]: XLA cannot partition a gather inside a region that is manual
    # over some axes only.
    return jax.lax.dynamic_index_in_dim(held, index, 0, keepdims=False)


def plus_row(held: Array, more: Array, *, index: Array) -> Array:
    """An array with something added to one of its rows."""
    if held.shape[0] == 1:
        return held + more[None]
    return jax.lax.dynamic_update_index_in_dim(
        held, row_of(held, index) + more, index, 0
    )


def read(ring: Tree, slot: Array) -> Tree:
    """What is in a slot; where there is none, something that nobody looks at."""
    return jax.tree.map(partial(row_of, index=jnp.maximum(slot, 0)), ring)


def kept_in(ring: Tree, value: Tree, slot: Array) -> Tree:
    """The ring with a value in a slot; as it was, where there is none."""

    def write(held: Array, new: Array) -> Array:
        place = jnp.maximum(slot, 0)
        row = jnp.where(slot >= 0, new, row_of(held, place))
        return jax.lax.dynamic_update_index_in_dim(held, row, place, 0)

    return jax.tree.map(write, ring, value)
