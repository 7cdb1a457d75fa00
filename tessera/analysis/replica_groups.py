# SPDX-License-Identifier: Apache-2.0
"""Finds the mesh axes that a collective of a compiled program runs over.

XLA identifies the devices of a collective by their positions in the program's device
list, which is the mesh in row-major order. It has three syntaxes:

    {{0,1},{2,3}}                            every group
    [2,4]<=[4,2]T(1,0)                       0..7 as 4×2, transposed, reshaped to 2×4
    mesh['axis_0'=4,'axis_1'=2] {'axis_1'}   the devices along some axes of a grid

The axis names of the third are XLA's own, so all three are converted to groups of
positions, and these to axes of the mesh that the user declared.
"""

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

Groups = tuple[tuple[int, ...], ...]

UNKNOWN = ("?",)

_GROUP = re.compile(r"\{([\d,\s]*)\}")
_IOTA = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[(.*?)\](?:, device_ids=\((.*)\))? \{(.*)\}$")
_AXIS = re.compile(r"'?([^'=,]+)'?=(\d+)")
_AXIS_REF = re.compile(r"'?([^':,]+)'?(?::\((\d+)\)(\d+))?")


def parse(text: str, num_devices: int) -> Groups:
    """The groups of a ``replica_groups`` attribute, as positions in the device list.

    Args:
      text: The attribute's value in any of XLA's syntaxes.
      num_devices: Devices of the program: ``{}`` is one group of all of them.

    Raises:
      ValueError: The syntax is unknown.

    Example:
      >>> parse("{{0,1},{2,3}}", 4)
      ((0, 1), (2, 3))
      >>> parse("[2,4]<=[4,2]T(1,0)", 8)
      ((0, 2, 4, 6), (1, 3, 5, 7))
      >>> parse("mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", 8)
      ((0, 4), (1, 5), (2, 6), (3, 7))
    """
    text = text.strip()
    if match := _MESH.match(text):
        return _rows(*_along_axes(*match.groups()))
    if text.startswith("["):
        grid = _iota(text)
        return _rows(grid, grid.shape[-1])
    if text.startswith("{"):
        groups = tuple(_ints(group) for group in _GROUP.findall(text))
        groups = tuple(group for group in groups if group)
        return groups or (tuple(range(num_devices)),)
    raise ValueError(f"replica groups in an unknown syntax: {text!r}")


def parse_pairs(text: str) -> tuple[tuple[int, int], ...]:
    """The (source, target) positions of a ``source_target_pairs`` attribute.

    Example:
      >>> parse_pairs("{{0,1},{1,0}}")
      ((0, 1), (1, 0))
    """
    pairs = re.findall(r"\{(\d+),\s*(\d+)\}", text)
    return tuple((int(source), int(target)) for source, target in pairs)


def axes_of(
    groups: Iterable[Sequence[int]], shape: Mapping[str, int]
) -> tuple[str, ...]:
    """The axes of a mesh along which data moves within groups of devices.

    Args:
      groups: Positions in the mesh in row-major order. Pairs of sender and receiver
        are groups too.
      shape: Size of each mesh axis, outermost first.

    Returns:
      The axes in which members of any group differ, in the mesh's order; empty when
      every group is one device, ``("?",)`` for positions outside the mesh. Groups
      smaller than the product of these axes are parts of them.

    Example:
      >>> axes_of(((0, 2), (1, 3)), {"dp": 2, "tp": 2})
      ('dp',)
    """
    pairs = [(group[0], member) for group in groups for member in group]
    flat = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    if flat.size and flat.max() >= math.prod(shape.values()):
        return UNKNOWN
    coordinates = np.array(np.unravel_index(flat, tuple(shape.values())))
    differ = (coordinates[..., 0] != coordinates[..., 1]).any(axis=-1)
    return tuple(itertools.compress(shape, differ))


def num_devices(axes: Iterable[str], shape: Mapping[str, int]) -> int:
    """The number of devices along some axes of a mesh; unknown axes count as one.

    Example:
      >>> num_devices(("dp", "tp"), {"dp": 2, "tp": 4, "pp": 3})
      8
    """
    return math.prod(shape.get(axis, 1) for axis in axes)


def _along_axes(
    axes: str, device_ids: str | None, selected: str
) -> tuple[np.ndarray, int]:
    """The grid of a ``mesh[...]`` group list, selected axes last, and the group size.

    A part of an axis may be selected: ``'a':(2)4`` is the middle of a = 2 × 4 × rest.
    """
    sizes = {name: int(size) for name, size in _AXIS.findall(axes)}
    grid = np.arange(math.prod(sizes.values()))
    if device_ids:
        is_iota = device_ids.startswith("[")
        grid = _iota(device_ids) if is_iota else np.array(_ints(device_ids))
    refs = [
        (name, int(before or 1), int(size or sizes[name]))
        for name, before, size in _AXIS_REF.findall(selected)
    ]
    # Factor every axis at the edges of the parts that are selected of it.
    factors: list[int] = []
    dims: dict[tuple[str, int], int] = {}
    for name, whole in sizes.items():
        parts = [(b, s) for ref, b, s in refs if ref == name]
        edges = sorted({1, whole} | {e for b, s in parts for e in (b, b * s)})
        for low, high in itertools.pairwise(edges):
            dims[name, low] = len(factors)
            factors.append(high // low)
    last = [dims[name, before] for name, before, size in refs if size > 1]
    others = [i for i in range(len(factors)) if i not in last]
    grid = grid.reshape(factors).transpose(others + last)
    return grid, math.prod(size for _, _, size in refs)


def _iota(text: str) -> np.ndarray:
    """``[2,4]<=[4,2]T(1,0)``: numbers in order as 4×2, transposed, reshaped to 2×4."""
    match = _IOTA.match(text)
    if not match:
        raise ValueError(f"a device list in an unknown syntax: {text!r}")
    dims, source, order = (_ints(part or "") for part in match.groups())
    grid = np.arange(math.prod(dims)).reshape(source or dims)
    return (grid.transpose(order) if order else grid).reshape(dims if source else (-1,))


def _rows(grid: np.ndarray, size: int) -> Groups:
    return tuple(tuple(map(int, row)) for row in grid.reshape(-1, size))


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())
