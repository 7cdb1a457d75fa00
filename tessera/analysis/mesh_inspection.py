# SPDX-License-Identifier: Apache-2.0
"""``dist.inspect(mesh)``: shows which devices are along each axis of a mesh.

On a target it also shows what connects them, which decides how fast the axis's
collectives are.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from tessera.analysis.tables import aligned
from tessera.foundations.device_grid import listed
from tessera.mesh import Mesh
from tessera.targets.link_times import Span, span
from tessera.targets.target import Target

_DIMS: Final = "xyz"


@dataclass(frozen=True, repr=False)
class MeshInspection:
    """Which devices are along each axis of a mesh; prints as text.

    Attributes:
      mesh: The mesh.
    """

    mesh: Mesh

    def as_text(self) -> str:
        """A line for each axis: its first group of devices, and what connects them."""
        mesh, target = self.mesh, self.mesh.target
        columns = ["axis", "size", "first devices"]
        rows = []
        for axis, size in mesh.shape.items():
            group = _along(mesh, axis)
            rows.append([axis, str(size), listed(group)])
            if target is not None:
                rows[-1].append(_connection(target, group))
        title = mesh.topology
        if target is not None:
            title += f", on {target}"
            columns.append("connected by")
        return f"{title}\n\n{aligned(columns, rows, right=['size'])}"

    __str__ = as_text
    __repr__ = as_text


def inspect_mesh(mesh: Mesh) -> MeshInspection:
    """Show which devices are along each axis of a mesh.

    Args:
      mesh: The mesh; on a target, the links are shown too.

    Example:
      >>> print(inspect_mesh(Mesh(["dp", "tp"], shape=(2, 2), target="h100:2x2")))
      dp × tp mesh, 2 × 2, on h100:2x2
      <BLANKLINE>
      axis  size  first devices  connected by
      dp       2  0, 2           InfiniBand, between 2 hosts
      tp       2  0, 1           NVLink
    """
    return MeshInspection(mesh)


def _along(mesh: Mesh, axis: str) -> tuple[int, ...]:
    """Ids of the devices along an axis, at the beginning of the others."""
    sizes = tuple(mesh.shape.values())
    grid = np.reshape(mesh.device_ids, sizes)
    index = tuple(slice(None) if name == axis else 0 for name in mesh.axes)
    return tuple(int(device) for device in np.ravel(grid[index]))


def _connection(target: Target, group: tuple[int, ...]) -> str:
    if len(group) == 1:
        return "one device"
    where, links = span(target, group), target.machine.links
    if target.machine.is_torus:
        return _rings(target, group, where)
    if where.domains == 1:
        return links[0].name
    unit = "hosts" if links[0].devices == target.machine.devices_per_host else "domains"
    text = f"{links[-1].name}, between {where.domains} {unit}"
    if where.inside > 1:
        text += f"; {links[0].name} for {where.inside} devices in each"
    return text


def _rings(target: Target, group: tuple[int, ...], where: Span) -> str:
    """The rings and lines of a torus that a group extends along."""
    name = target.machine.links[0].name
    coordinates = zip(*(target.coordinates[device] for device in group), strict=True)
    dims = [dim for dim, used in enumerate(coordinates) if len(set(used)) > 1]
    parts = [
        f"a {'ring' if math.isclose(share, 1) else 'line'} of {length} along "
        f"{_DIMS[dim]}"
        for dim, (length, share) in zip(dims, where.rings, strict=True)
    ]
    return f"{name}: {' and '.join(parts)}" if parts else f"{name}, on one chip"
