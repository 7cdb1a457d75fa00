# SPDX-License-Identifier: Apache-2.0
r"""Sums in a fixed order: the same bits on any number of devices.

A batch is split into parts, the same number on every mesh. The computation of
each is compiled apart from its surroundings, and the results are added in one binary
tree: its lower levels on each device, its upper levels between devices.

  part         0   1   2   3   4   5   6   7
                \ /     \ /     \ /     \ /     on 4 devices: each by itself
                  \_____/         \_____/       devices 0-1 and 2-3
                      \_____________/           devices 0-2 and 1-3

Where the number of devices is no power of two, no device has a complete part of the
tree. Each then adds its own share of the elements, from all parts.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tessera.foundations.tree import Tree, zeros
from tessera.ops import device_collectives


def optimization_barrier(function: Callable[..., Tree], *arguments: Tree) -> Tree:
    """``function(*arguments)`` behind an optimization barrier.

    It is compiled alike whatever surrounds it. XLA would fuse it with its neighbors,
    which differ from mesh to mesh, and round differently where a product and a sum
    become one instruction. A branch with a condition that XLA cannot evaluate is a
    barrier; it is always taken. (A loop is not: XLA hoists what is loop-invariant.)

    Args:
      function: Returns a tree of arrays.
      arguments: Trees of arrays, at least one of which is not empty.

    Example:
      >>> optimization_barrier(jnp.add, jnp.float32(1.0), jnp.float32(2.0))
      Array(3., dtype=float32)
    """
    first = next(leaf for leaf in jax.tree.leaves(arguments) if leaf.size)
    always = _lowest_bit(first) < 2  # it is at most 1

    def empty(*arguments: Tree) -> Tree:
        return zeros(jax.eval_shape(function, *arguments))

    return jax.lax.cond(always, function, empty, *arguments)


def _lowest_bit(array: jax.Array) -> jax.Array:
    """The lowest bit of an array's first number."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    first = jnp.real(jnp.ravel(array)[0])
    if jnp.issubdtype(first.dtype, jnp.floating):
        same_size = jnp.dtype(f"i{first.dtype.itemsize}")
        first = jax.lax.bitcast_convert_type(first, same_size)
    return first.astype(jnp.int32) & 1


def pairwise_sum(function: Callable[[jax.Array], Tree], count: int) -> Tree:
    """``function(0) + ... + function(count - 1)``, added pairwise.

    At most log2(count) sums are live at a time.

    Args:
      function: Maps an int32 scalar to a tree of arrays.
      count: The number of summands, a power of two.

    Example:
      >>> pairwise_sum(lambda row: row + 1, 8)
      Array(36, dtype=int32)
    """

    def run(start: jax.Array, count: int) -> Tree:
        if count == 1:
            return function(start)
        half = count // 2
        return _sum_of_two(lambda part: run(start + half * part, half))

    return run(jnp.int32(0), count)


def sum_over_devices(tree: Tree, axes: tuple[str, ...], size: int) -> Tree:
    """The upper levels of the tree: inside an SPMD region, the sum over mesh axes.

    A butterfly of log2(size) exchanges: neighbors exchange their sums, then neighbors
    of pairs, and so on. Each pair adds the same two numbers, so all devices get the
    same bits.

    Args:
      tree: Arrays of this device.
      axes: Mesh axes, outer first.
      size: The number of devices along the axes, a power of two.
    """
    distance = 1
    while distance < size:
        pairs = [(device, device ^ distance) for device in range(size)]

        def add(own: jax.Array, pairs: Any = pairs) -> jax.Array:
            return own + device_collectives.permuted(own, axes, pairs)

        tree = jax.tree.map(add, tree)
        distance *= 2
    return tree


def sum_of_rounds(
    function: Callable[[jax.Array], Tree], count: int, axes: tuple[str, ...], size: int
) -> Tree:
    """Like ``sum_over_devices`` of ``pairwise_sum``, on any number of devices.

    In each round every device computes one summand. All exchange them, so that each
    device has its share of the elements of all summands, and adds those in the tree.
    That takes the memory of ``count / size`` whole summands.

    Args:
      function: Maps an int32 scalar to a tree of arrays.
      count: The number of summands, a power of two.
      axes: Mesh axes, outer first.
      size: The number of devices along the axes.
    """
    rank = jax.lax.axis_index(axes)

    def share(summand: jax.Array) -> jax.Array:
        flat = jnp.ravel(summand)
        parts = jnp.pad(flat, (0, -flat.size % size)).reshape(size, -1)
        return device_collectives.all_to_all(parts, axes, 0, 0)

    def compute(_: None, first: jax.Array) -> tuple[None, Tree]:
        # What devices without a summand compute in the last round is dropped.
        summand = function(jnp.minimum(first + rank, count - 1))
        return None, jax.tree.map(share, summand)

    firsts = jnp.arange(0, count, size, dtype=jnp.int32)
    _, shares = jax.lax.scan(compute, None, firsts)

    def add(shares: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
        sums = shares.reshape(-1, shares.shape[-1])[:count]
        while len(sums) > 1:
            sums = sums[0::2] + sums[1::2]
        whole = device_collectives.all_gather(sums[0], axes, 0)
        return whole[: math.prod(like.shape)].reshape(like.shape)

    return jax.tree.map(add, shares, jax.eval_shape(function, jnp.int32(0)))


def _sum_of_two(function: Callable[[jax.Array], Tree]) -> Tree:
    """``function(0) + function(1)``, compiled once."""
    empty = zeros(jax.eval_shape(function, jnp.int32(0)))

    def add(total: Tree, index: jax.Array) -> tuple[Tree, None]:
        # Not from zero, so that a sum of negative zeros is a negative zero.
        def one(before: jax.Array, value: jax.Array) -> jax.Array:
            return jnp.where(index == 0, value, before + value)

        return jax.tree.map(one, total, function(index)), None

    return jax.lax.scan(add, empty, jnp.arange(2, dtype=jnp.int32))[0]
