# SPDX-License-Identifier: Apache-2.0
"""Diagnoses what is wrong inside an SPMD region whose result depends on the mesh.

On one device a region's body computes whole arrays. On a mesh each device has a block,
a copy or a partial sum of them, and the numbers show which. A value that is none of
these is where the region goes wrong, or is computed from partial sums that should have
been added up before.
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np

from tessera.debug.differences import Difference, Tolerance, shortened, wide
from tessera.debug.intermediates import sites_inside
from tessera.debug.mesh_runs import MeshRun, Pair, aligned, chunks, paired_values
from tessera.primitive_properties import DEVICE_SUMS

Array: TypeAlias = np.ndarray[Any, Any]


def diagnose(
    reference: MeshRun,
    run: MeshRun,
    region: Pair,
    wrong: Difference,
    tolerance: Tolerance,
) -> Iterator[tuple[str, str]]:
    """Explain a difference, as far as the numbers inside the region do.

    Args:
      reference: The step on one device.
      run: The step on a mesh.
      region: The value that differs, which an SPMD region returns.
      wrong: The difference.
      tolerance: What is no difference.

    Returns:
      Lines, each with what it is about.
    """
    inside = [
        sites_inside(each.graph.program, site, each.graph.platform)
        for each, site in zip((reference, run), region, strict=True)
    ]
    partial: dict[str, str] = {}  # operations whose results are partial sums
    for chunk in chunks(aligned(*inside)):
        for site, other, expected, values in paired_values(reference, run, chunk):
            whole = wide(expected[wrong.iterations][0])
            per_device = wide(values[wrong.iterations])
            sizes = {axis: run.mesh.shape[axis] for axis in other.axes}
            allowed = tolerance.allowed(site, whole)
            axes = summed_axes(whole, per_device, sizes, allowed)
            if axes is None:
                yield "wrong", f"first in {shortened(site.label)}"
                for label, over in list(partial.items())[-1:]:
                    line = shortened(label)
                    yield "before", f"{line} gives parts of a sum over {over}"
                return
            if axes:
                partial[site.label] = ", ".join(axes)
            elif site.operation in DEVICE_SUMS:
                partial.clear()  # they were added up
    if over := partial.get(wrong.site.inside):
        yield "wrong", f"these are parts of a sum over {over}, which nothing adds up"
    else:
        yield "wrong", "each device has a block or a copy of it: see the out_specs"


def summed_axes(
    whole: Array, per_device: Array, sizes: Mapping[str, int], allowed: Array
) -> tuple[str, ...] | None:
    """The mesh axes over which devices have partial sums of a value.

    Args:
      whole: The value on one device.
      per_device: The value of each device of the mesh, as rows.
      sizes: Size of each mesh axis; devices are counted in row-major order.
      allowed: The largest error of each element of ``whole``.

    Returns:
      The axes over which the devices' values add up to blocks of ``whole``: none where
      they are blocks or copies of it already. None where no sum of them is.

    Example:
      >>> whole = np.array([3.0, 4.0])
      >>> per_device = np.array([[1.0, 1.0], [2.0, 3.0]])
      >>> summed_axes(whole, per_device, {"tp": 2}, np.zeros(2))
      ('tp',)
    """
    block = per_device.shape[1:]
    if len(block) != whole.ndim or not all(
        part and not size % part for size, part in zip(whole.shape, block, strict=True)
    ):
        return None
    grid = per_device.reshape(*sizes.values(), *block)
    split = [axis for axis, size in sizes.items() if size > 1]
    for count in range(len(split) + 1):
        for axes in itertools.combinations(split, count):
            summed = grid.sum(axis=tuple(list(sizes).index(axis) for axis in axes))
            if _are_blocks(whole, summed.reshape(-1, *block), allowed):
                return axes
    return None


def _are_blocks(whole: Array, blocks: Array, allowed: Array) -> bool:
    """Whether each is a block of the whole, and each block of the whole is there."""
    parts, limits = (_split(array, blocks.shape[1:]) for array in (whole, allowed))
    seen: set[int] = set()
    for block in blocks:
        with np.errstate(invalid="ignore"):
            near = (np.abs(parts - block) <= limits) | (parts == block)
        matches = near.reshape(len(parts), -1).all(axis=1).nonzero()[0]
        if not len(matches):
            return False
        seen.update(map(int, matches))
    return len(seen) == len(parts)


def _split(whole: Array, block: tuple[int, ...]) -> Array:
    """The blocks of an array, as rows."""
    counts = [n // b for n, b in zip(whole.shape, block, strict=True)]
    grid = whole.reshape([n for pair in zip(counts, block, strict=True) for n in pair])
    order = [*range(0, grid.ndim, 2), *range(1, grid.ndim, 2)]
    return grid.transpose(order).reshape(-1, *block)
