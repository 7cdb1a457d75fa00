# SPDX-License-Identifier: Apache-2.0
"""Lays the axes of a mesh onto the links of a target, or of TPU slices that are here.

Devices of hosts are numbered host by host, so in row-major order the inner axes of a
mesh are inside the hosts. On a torus, JAX's own assignment of axes to the dims of the
torus decides, and the first axes cross slices.
"""

import math
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from jax.experimental import mesh_utils

from tessera.errors import TargetError, TesseraWarning
from tessera.targets.mesh_devices import find_devices
from tessera.targets.target import Target

# Axes whose collectives take a large part of a step, and are seldom hidden.
_HEAVY: Final = ("fsdp", "tp", "ep", "cp", "sp")


@dataclass(frozen=True)
class _Chip:
    """What ``mesh_utils`` reads of a ``jax.Device``."""

    id: int
    coords: tuple[int, ...]
    core_on_chip: int
    device_kind: str
    platform: str = "tpu"
    process_index: int = 0
    slice_index: int = 0


def device_grid(
    target: Target, sizes: tuple[int, ...], ids: Sequence[int] | None = None
) -> tuple[int, ...]:
    """The ids of a target's devices, in row-major order of a mesh.

    Args:
      target: The machine.
      sizes: Size of each axis of the mesh, outermost first.
      ids: Devices that were chosen, which keep their order; None chooses.

    Raises:
      TargetError: [T711] the target lacks some of the devices, or a slice of TPUs has
        more of them than another.
    """
    count, available = math.prod(sizes), target.num_devices
    highest = max(ids) + 1 if ids is not None else count
    if highest > available:
        raise TargetError(
            "the mesh has devices that its target does not have",
            got=f"{highest} devices, and {target} has {available}",
            fix="use a smaller mesh or a larger target",
        )
    if ids is None and target.machine.is_torus and not count % target.slice_size:
        return tuple(chip.id for chip in lay_out(_chips(target)[:count], sizes))
    ids = tuple(range(count) if ids is None else ids)
    if target.machine.is_torus:
        _check_slices(each // target.slice_size for each in ids)
    return ids


def grid_here(sizes: tuple[int, ...], ids: tuple[int, ...]) -> tuple[int, ...]:
    """Ids of devices that are here, in row-major order of a mesh.

    Those of several TPU slices are laid out; all others keep their order.

    Raises:
      TargetError: [T711] a slice has more of them than another.
    """
    slices = slices_of(ids, None)
    if len({*slices}) < 2:
        return ids
    _check_slices(slices)
    id_of = dict(zip(find_devices(ids) or (), ids, strict=True))
    return tuple(id_of[device] for device in lay_out([*id_of], sizes))


def slices_of(ids: Sequence[int], target: Target | None) -> tuple[int, ...]:
    """The slices of some devices: of TPUs, and of the racks of a target."""
    if target is not None:
        return tuple(each // target.slice_size for each in ids)
    return tuple(map(_slice_of, find_devices(tuple(ids)) or ())) or (0,) * len(ids)


def dcn_shape(
    axes: Sequence[str], sizes: tuple[int, ...], slices: Sequence[int]
) -> dict[str, int]:
    """In how many slices each axis of a mesh lies, of those that lie in several.

    Example:
      >>> dcn_shape(["dp", "tp"], (2, 2), [0, 0, 1, 1])
      {'dp': 2}
    """
    grid, found = np.reshape(slices, sizes), dict[str, int]()
    for dim, axis in enumerate(axes):
        lines = np.moveaxis(grid, dim, -1).reshape(-1, sizes[dim]).tolist()
        found[axis] = max(len({*line}) for line in lines)
    return {axis: number for axis, number in found.items() if number > 1}


def warn_of_slow_axes(crossing: Mapping[str, int]) -> None:
    """Say which of the axes that cross slices send much.

    Warns:
      TesseraWarning: There are any.
    """
    if heavy := [axis for axis in crossing if axis in _HEAVY]:
        text = f"axes that send much cross slices, over slow links: {', '.join(heavy)};"
        text += " name dp or pp first, with a multiple of the number of slices"
        warnings.warn(text, TesseraWarning, stacklevel=2)


def lay_out(devices: Sequence[Any], sizes: tuple[int, ...]) -> list[Any]:
    """Lay TPU devices out as JAX does, outer axes over the slices.

    The first axes take the slices: all of an axis if the number of slices is a multiple
    of its size, else as many parts of it as divide both.

    Example:
      >>> chips = _chips(Target.parse("v5e:2x2*2"))
      >>> [_slice_of(chip) for chip in lay_out(chips, (4, 2))]  # dp = 2 slices × 2
      [0, 0, 0, 0, 1, 1, 1, 1]
    """
    left, across = len({*map(_slice_of, devices)}), list[int]()
    for size in sizes:
        across.append(math.gcd(left, size))
        left //= across[-1]
    inside = [size // parts for size, parts in zip(sizes, across, strict=True)]
    grid = mesh_utils.create_hybrid_device_mesh(
        inside, across, devices, allow_split_physical_axes=True
    )
    return list(grid.flat)


def _slice_of(device: Any) -> int:
    return device.slice_index if device.platform == "tpu" else 0


def _check_slices(slices: Iterable[int]) -> None:
    counts = Counter(slices)
    if len({*counts.values()}) > 1:
        raise TargetError(
            "the mesh has more devices of one slice than of another",
            got=", ".join(f"{n} of slice {each}" for each, n in counts.items()),
            fix="use as many of each: all slices run the same program",
        )


def _chips(target: Target) -> list[_Chip]:
    copies = target.machine.devices_per_chip
    kind = target.machine.device_kind
    return [
        _Chip(number, (*place, 0)[:3], number % copies, kind, slice_index=own)
        for number, (*place, own) in enumerate(target.coordinates)
    ]
