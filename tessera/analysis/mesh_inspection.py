# SPDX-License-Identifier: Apache-2.0
"""``dist.inspect(mesh)``: draws where the axes of a mesh lie on hosts or on a torus.

Each cell is a device with its indices along the axes. Below is what connects the
devices along each axis, which decides how fast its collectives are.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from tessera.analysis.layout_figures import MAX_GRIDS, MAX_SIDE, Grid, Picture
from tessera.analysis.tables import Cell, aligned, html_lines, html_table
from tessera.mesh import Mesh
from tessera.targets.link_times import Span, span
from tessera.targets.target import Target

_COLUMNS: Final = ("axis", "size", "connected by")
_DIMS: Final = "xyz"
_GAP: Final = "…"


@dataclass(frozen=True, repr=False)
class MeshInspection:
    """Where the devices of a mesh are; prints as text, and renders in a notebook.

    Attributes:
      mesh: The mesh.
    """

    mesh: Mesh

    def as_text(self) -> str:
        """The grids of devices, then a line for each axis."""
        parts = [self._title, self.picture.as_text()]
        if self.mesh.target is not None:
            parts.append(aligned(_COLUMNS, self._axes, right=["size"]))
        return "\n\n".join(parts)

    __str__ = as_text
    __repr__ = as_text

    def _repr_html_(self) -> str:
        axes = html_table(_COLUMNS, self._axes) if self.mesh.target else ""
        return html_lines([self._title]) + self.picture.as_html() + axes

    @property
    def _title(self) -> str:
        mesh, target = self.mesh, self.mesh.target
        if target is None:
            return f"{mesh.topology}; each cell: the id of a device"
        return f"{mesh.topology}, on {target}; each cell: {', '.join(mesh.axes)}"

    @cached_property
    def picture(self) -> Picture:
        """Hosts and their devices, or the planes of a torus."""
        mesh, target = self.mesh, self.mesh.target
        if target is None:
            return _by_id(mesh)
        cells: dict[tuple[int, ...], list[int]] = {}
        for position, device in enumerate(mesh.device_ids):
            cells.setdefault(target.coordinates[device], []).append(position)
        if not target.machine.is_torus:
            hosts = target.shape if len(target.shape) == 2 else (1, *target.shape)
            places: list[list[tuple[int, ...]]] = [
                [(host, device) for device in range(hosts[1])]
                for host in range(hosts[0])
            ]
            return Picture((self._grid("", "host / device", places, cells),))
        width, height, *depth = target.shape
        planes = [(z,) for z in range(depth[0])] if depth else [()]
        grids = tuple(
            self._grid(
                f"z = {plane[0]}" if plane else "",
                "y / x",
                [[(x, y, *plane) for x in range(width)] for y in range(height)],
                cells,
            )
            for plane in planes[:MAX_GRIDS]
        )
        return Picture(grids, len(planes) - len(grids))

    def _grid(
        self,
        caption: str,
        corner: str,
        places: list[list[tuple[int, ...]]],
        cells: dict[tuple[int, ...], list[int]],
    ) -> Grid:
        """Devices at places, the middle of many rows and columns left out."""
        down, across = _shown(len(places)), _shown(len(places[0]))
        return Grid(
            caption=caption,
            header=(corner, *map(_label, across)),
            rows=tuple(
                (
                    _label(row),
                    *(
                        Cell(_GAP)
                        if row is None or column is None
                        else self._cell(cells.get(places[row][column], []))
                        for column in across
                    ),
                )
                for row in down
            ),
        )

    def _cell(self, positions: Sequence[int]) -> Cell:
        """The indices of a device along each axis, colored by the outermost."""
        if not positions:
            return Cell("-")
        indices = [tuple(self.mesh.coordinates(p).values()) for p in positions]
        sizes = list(self.mesh.shape.values())
        outer = next((axis for axis, size in enumerate(sizes) if size > 1), 0)
        text = " ".join(",".join(map(str, index)) for index in indices)
        return Cell(text, indices[0][outer] / sizes[outer])

    @cached_property
    def _axes(self) -> list[list[str]]:
        target = self.mesh.target
        assert target is not None
        return [
            [axis, str(size), _connection(target, _along(self.mesh, axis))]
            for axis, size in self.mesh.shape.items()
        ]


def inspect_mesh(mesh: Mesh) -> MeshInspection:
    """Show where the axes of a mesh lie.

    Args:
      mesh: On a target; of any other the picture has the devices by their ids.

    Example:
      >>> print(inspect_mesh(Mesh(["dp", "tp"], shape=(2, 2), target="h100:2x2")))
      dp × tp mesh, 2 × 2, on h100:2x2; each cell: dp, tp
      <BLANKLINE>
      host / device  0    1
      0              0,0  0,1
      1              1,0  1,1
      <BLANKLINE>
      axis  size  connected by
      dp       2  InfiniBand, between 2 hosts
      tp       2  NVLink
    """
    return MeshInspection(mesh)


def _by_id(mesh: Mesh) -> Picture:
    """Device ids: the last axis across, all others down."""
    *outer, last = mesh.axes
    grid = np.reshape(mesh.device_ids, (-1, mesh.shape[last]))
    down, across = _shown(len(grid)), _shown(mesh.shape[last])
    names = [
        ",".join(map(str, index))
        for index in itertools.product(*(range(mesh.shape[axis]) for axis in outer))
    ]
    rows = tuple(
        (
            _GAP if row is None else names[row],
            *(
                Cell(_GAP if row is None or c is None else str(grid[row, c]))
                for c in across
            ),
        )
        for row in down
    )
    corner = f"{','.join(outer)} / {last}" if outer else last
    return Picture((Grid("", (corner, *map(_label, across)), rows),))


def _shown(size: int) -> list[int | None]:
    """The rows or columns that are drawn; None stands for the middle of very many."""
    if size <= MAX_SIDE:
        return list(range(size))
    half = MAX_SIDE // 2
    return [*range(half), None, *range(size - half, size)]


def _label(number: int | None) -> str:
    return _GAP if number is None else str(number)


def _along(mesh: Mesh, axis: str) -> list[int]:
    """Ids of the devices along an axis, at the beginning of the others."""
    sizes = tuple(mesh.shape.values())
    grid = np.reshape(mesh.device_ids, sizes)
    place = tuple(slice(None) if name == axis else 0 for name in mesh.axes)
    return [int(device) for device in np.ravel(grid[place])]


def _connection(target: Target, group: list[int]) -> str:
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


def _rings(target: Target, group: list[int], where: Span) -> str:
    """The rings and lines of a torus that a group extends along."""
    name = target.machine.links[0].name
    places = zip(*(target.coordinates[device] for device in group), strict=True)
    dims = [dim for dim, used in enumerate(places) if len(set(used)) > 1]
    parts = [
        f"a {'ring' if math.isclose(share, 1) else 'line'} of {length} along "
        f"{_DIMS[dim]}"
        for dim, (length, share) in zip(dims, where.rings, strict=True)
    ]
    return f"{name}: {' and '.join(parts)}" if parts else f"{name}, on one chip"
