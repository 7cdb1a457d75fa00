# SPDX-License-Identifier: Apache-2.0
"""Lays the axes of a mesh onto the links of a target.

Devices of hosts are numbered host by host, so in row-major order the inner axes of a
mesh are inside the hosts. On a torus, JAX's own assignment of axes to the dims of the
torus decides, as it does where the devices are.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jax.experimental import mesh_utils

from tessera.errors import TargetError
from tessera.targets.target import Target


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
      TargetError: [T711] the target lacks some of the devices.
    """
    count, available = math.prod(sizes), target.num_devices
    highest = max(ids) + 1 if ids is not None else count
    if highest > available:
        raise TargetError(
            "the mesh has devices that its target does not have",
            got=f"{highest} devices, and {target} has {available}",
            fix="use a smaller mesh or a larger target",
        )
    if ids is not None:
        return tuple(ids)
    if not target.machine.is_torus or count < available:
        return tuple(range(count))
    grid = mesh_utils.create_device_mesh(
        sizes, _chips(target), allow_split_physical_axes=True
    )
    return tuple(int(chip.id) for chip in grid.flat)


def _chips(target: Target) -> list[_Chip]:
    copies = target.machine.devices_per_chip
    return [
        _Chip(number, (*place, 0)[:3], number % copies, target.machine.device_kind)
        for number, place in enumerate(target.coordinates)
    ]
