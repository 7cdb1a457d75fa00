# SPDX-License-Identifier: Apache-2.0
"""What the values that devices hold in a manual region are of the one device's value.

On one device a region's body computes whole arrays. On a mesh each device holds a
block, a copy or a part of a sum of them, and which it is can be seen from the numbers.
A value that is nothing of the kind is where the region goes wrong.
"""

import itertools
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]


def summed_axes(
    whole: Array, held: Array, sizes: Mapping[str, int], allowed: Array
) -> tuple[str, ...] | None:
    """The mesh axes over which devices hold parts of a sum.

    Args:
      whole: The value on one device.
      held: What each device of the mesh holds, as rows.
      sizes: Size of each mesh axis; devices are counted row by row.
      allowed: The largest error of each element of ``whole``.

    Returns:
      The axes over which the blocks add up to blocks of ``whole``: none where they are
      blocks or copies of it already. None where no sum of them is.

    Example:
      >>> whole = np.array([3.0, 4.0])
      >>> held = np.array([[1.0, 1.0], [2.0, 3.0]])
      >>> summed_axes(whole, held, {"tp": 2}, np.zeros(2))
      ('tp',)
    """
    if held.ndim - 1 != whole.ndim or not all(
        block and not size % block
        for size, block in zip(whole.shape, held.shape[1:], strict=True)
    ):
        return None
    grid = held.reshape(*sizes.values(), *held.shape[1:])
    split = [axis for axis, size in sizes.items() if size > 1]
    for count in range(len(split) + 1):
        for axes in itertools.combinations(split, count):
            places = tuple(list(sizes).index(axis) for axis in axes)
            blocks = grid.sum(axis=places).reshape(-1, *held.shape[1:])
            if _are_blocks(whole, blocks, allowed):
                return axes
    return None


def _are_blocks(whole: Array, blocks: Array, allowed: Array) -> bool:
    """Whether each is a block of the whole, and each block of the whole is there."""
    parts, limits = (_cut(array, blocks.shape[1:]) for array in (whole, allowed))
    seen: set[int] = set()
    for block in blocks:
        with np.errstate(invalid="ignore"):
            near = (np.abs(parts - block) <= limits) | (parts == block)
        found = near.reshape(len(parts), -1).all(axis=1).nonzero()[0]
        if not len(found):
            return False
        seen.update(map(int, found))
    return len(seen) == len(parts)


def _cut(whole: Array, block: tuple[int, ...]) -> Array:
    """An array as rows of blocks of a shape."""
    counts = [n // b for n, b in zip(whole.shape, block, strict=True)]
    pairs = [n for pair in zip(counts, block, strict=True) for n in pair]
    grid = whole.reshape(pairs)
    rank = len(block)
    order = [*range(0, 2 * rank, 2), *range(1, 2 * rank, 2)]
    return grid.transpose(order).reshape(-1, *block)
