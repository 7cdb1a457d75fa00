# SPDX-License-Identifier: Apache-2.0
"""``dist.inspect``: where the parts of an array, or of a whole tree, lie.

It reads declarations and shardings, never values: a lazy tensor stays lazy, and a mesh
of devices that do not exist can be looked at like any other. How that is drawn is in
modules of their own, which are imported when something is.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding, PartitionSpec

from tessera import _jax, scope
from tessera.analysis.memory import format_bytes
from tessera.analysis.tables import aligned
from tessera.mesh import Mesh
from tessera.shard import DistTensor, local_shape
from tessera.spec import axes_of_dims, stored_shape

if TYPE_CHECKING:
    from tessera.analysis.layout_figures import Picture

MAX_DEVICES_LISTED = 16
Block: TypeAlias = tuple[tuple[int, int], ...]

_REPLICATED = PartitionSpec()

_COLUMNS = (
    *("array", "global", "spec", "per device", "bytes", "bytes per device"),
    "replicated over",
)


@dataclass(frozen=True)
class LeafLayout:
    """Where one array lies.

    Attributes:
      path: Way to it in the tree, such as ``['decoder']['up']``; empty for the root.
      kind: What it is: ``lazy tensor 'E'``, ``array``, ``NumPy array``, …
      dtype: NumPy dtype.
      shape: Global shape.
      mesh: The mesh it is on; None for one device, or where none is known.
      spec: Its layout over the mesh; replicated where there is none.
      placed: Device ids and what each holds, for devices that form no mesh.
      on_host: Whether it lies in the memory of the devices' host.
    """

    path: str
    kind: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    mesh: Mesh | None = None
    spec: PartitionSpec = _REPLICATED
    placed: tuple[tuple[int, Block], ...] = ()
    on_host: bool = False

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of one device's block, padding included."""
        if self.mesh is not None:
            return local_shape(self.shape, self.spec, self.mesh)
        if self.placed:
            return tuple(stop - start for start, stop in self.placed[0][1])
        return self.shape

    @property
    def nbytes(self) -> int:
        """Bytes of the global array."""
        return _nbytes(self.shape, self.dtype)

    @property
    def local_nbytes(self) -> int:
        """Bytes of one device's block."""
        return _nbytes(self.local_shape, self.dtype)

    @property
    def replicated_over(self) -> tuple[str, ...]:
        """The mesh axes along which devices hold copies."""
        if self.mesh is None:
            return ()
        split = {axis for axes in self._axes for axis in axes}
        return tuple(axis for axis in self.mesh.axes if axis not in split)

    @property
    def copies(self) -> int:
        """How many devices hold each element."""
        if self.mesh is not None:
            return self.mesh.axis_size(self.replicated_over)
        return max(1, len(self.placed) // max(1, len({b for _, b in self.placed})))

    @property
    def num_devices(self) -> int:
        """How many devices hold a block; 0 where none is known."""
        return len(self.placed) if self.mesh is None else self.mesh.size

    def device_at(self, position: int) -> int:
        """The id of the device at a position."""
        if self.mesh is None:
            return self.placed[position][0]
        return self.mesh.device_ids[position]

    def block_at(self, position: int) -> Block:
        """The (start, stop) of every dim that the device at a position holds."""
        if self.mesh is None:
            return self.placed[position][1]
        place = self.mesh.coordinates(position)
        sizes = self.mesh.shape
        bounds = []
        for axes, size in zip(self._axes, self.local_shape, strict=True):
            index = 0
            for axis in axes:
                index = index * sizes[axis] + place[axis]
            bounds.append((index * size, (index + 1) * size))
        # A device stores padding after the end of the array.
        ends = zip(bounds, self.shape, strict=True)
        return tuple((min(a, n), min(b, n)) for (a, b), n in ends)

    @property
    def picture(self) -> "Picture":
        """Which device holds which block, as grids."""
        from tessera.analysis.layout_figures import draw

        places = range(self.num_devices)
        blocks = [(self.device_at(i), self.block_at(i)) for i in places]
        return draw(blocks, self._axes if self.mesh is not None else ())

    @property
    def pattern(self) -> object:
        """What arrays have in common whose pictures differ in their sizes alone."""
        return (self.mesh, self._axes) if self.mesh is not None else self.placed

    @property
    def _axes(self) -> tuple[tuple[str, ...], ...]:
        return axes_of_dims(self.spec, len(self.shape))


@dataclass(frozen=True, repr=False)
class Inspection:
    """What :func:`inspect` found; prints as text, and renders in a notebook.

    Attributes:
      leaves: One entry per array, in the order of the tree.
    """

    leaves: tuple[LeafLayout, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all global arrays."""
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def local_nbytes(self) -> int:
        """Bytes of all blocks of one device."""
        return sum(leaf.local_nbytes for leaf in self.leaves)

    @property
    def host_nbytes(self) -> int:
        """Those bytes of one device that lie in the memory of its host."""
        return sum(leaf.local_nbytes for leaf in self.leaves if leaf.on_host)

    @property
    def replicated_nbytes(self) -> int:
        """Those bytes of one device that every device of a larger mesh holds too."""
        return sum(
            leaf.local_nbytes
            for leaf in self.leaves
            if leaf.copies == leaf.num_devices > 1
        )

    def as_text(self) -> str:
        """The inspection as aligned plain text."""
        leaf = self._single
        if leaf is None:
            table = aligned(_COLUMNS, map(_cells, self.leaves), right=_COLUMNS[4:6])
            return "\n".join([table, "", *self._totals()])
        facts = "\n".join(_facts(leaf))
        if not leaf.num_devices:
            return facts
        devices = aligned(*_devices(leaf))
        return "\n\n".join([facts, leaf.picture.as_text(), devices])

    def __str__(self) -> str:
        return self.as_text()

    def __repr__(self) -> str:
        return self.as_text()

    def _repr_html_(self) -> str:
        from tessera.analysis import html

        leaf = self._single
        if leaf is None:
            table = html.table(_COLUMNS, map(_cells, self.leaves))
            return table + html.lines(self._totals()) + "".join(self._pictures())
        facts = html.lines(_facts(leaf))
        if not leaf.num_devices:
            return facts
        devices = html.section("each device", html.table(*_devices(leaf)))
        return facts + html.picture(leaf.picture) + devices

    def _pictures(self) -> Iterator[str]:
        """One picture for all arrays of a tree that are split alike."""
        from tessera.analysis import html

        alike: dict[object, list[LeafLayout]] = {}
        for leaf in self.leaves:
            if leaf.num_devices:
                alike.setdefault(leaf.pattern, []).append(leaf)
        for leaves in alike.values():
            first, count = leaves[0], len(leaves)
            more = f" and {count - 1} more split alike" if count > 1 else ""
            title = f"{first.path or first.kind}{more}: {list(first.shape)}"
            if first.mesh is not None:
                title += f" over {first.spec}"
            yield html.section(title, html.picture(first.picture))

    @property
    def _single(self) -> LeafLayout | None:
        """The one array, if an array and no tree was inspected."""
        alone = len(self.leaves) == 1 and not self.leaves[0].path
        return self.leaves[0] if alone else None

    @property
    def _has_host(self) -> bool:
        return any(leaf.on_host for leaf in self.leaves)

    def _totals(self) -> list[str]:
        count = len(self.leaves)
        meshes = dict.fromkeys(leaf.mesh for leaf in self.leaves if leaf.mesh)
        return [
            f"{count} array{'' if count == 1 else 's'}: "
            f"{format_bytes(self.nbytes)} global, "
            f"{format_bytes(self.local_nbytes)} per device, of which "
            f"{format_bytes(self.replicated_nbytes)} whole on every device",
            *([f"{format_bytes(self.host_nbytes)} of it on the host"] * self._has_host),
            *(f"on {mesh!r}" for mesh in meshes),
        ]


def inspect(tree: Any) -> Inspection:
    """Show how arrays are split: shapes, bytes, and which device holds which slice.

    Args:
      tree: A lazy tensor; a JAX, NumPy, traced or abstract array; or any tree of them.

    Returns:
      An object that prints as text and renders in a notebook.

    Example:
      >>> from tessera.shard import ShardSpec, tensor
      >>> mesh = Mesh(["tp", "dp"], devices=[[0, 1], [2, 3]])
      >>> rows = ShardSpec(partition=("row",), mesh_axes=("tp",))
      >>> table = inspect(tensor((10_000_000, 4096), rows, mesh, dtype="bf16"))
      >>> table.leaves[0].local_shape, table.leaves[0].replicated_over
      ((5000000, 4096), ('dp',))
      >>> table.leaves[0].block_at(3)
      ((5000000, 10000000), (0, 4096))
    """
    found = jax.tree.leaves_with_path(tree, is_leaf=_is_tensor)
    return Inspection(tuple(_leaf(jax.tree_util.keystr(p), leaf) for p, leaf in found))


def _leaf(path: str, value: Any) -> LeafLayout:
    if isinstance(value, DistTensor):
        kind = value.described if value.is_materialized else f"lazy {value.described}"
        return LeafLayout(path, kind, value.dtype, value.shape, value.mesh, value.spec)
    if isinstance(value, jax.core.Tracer):
        mesh, spec = scope.layout_of(value) or (None, _REPLICATED)
        kind = "traced array" if mesh else "traced array of unknown layout"
        return LeafLayout(path, kind, value.dtype, value.shape, mesh, spec)
    if isinstance(value, (jax.Array, jax.ShapeDtypeStruct)):
        kind = "array" if isinstance(value, jax.Array) else "abstract array"
        on_host = _jax.on_host(value)
        kind += " on the host" * on_host
        leaf = LeafLayout(path, kind, value.dtype, value.shape, on_host=on_host)
        return _sharded(leaf, value.sharding)
    array = np.asarray(value)
    return LeafLayout(path, "NumPy array", array.dtype, array.shape)


def _sharded(leaf: LeafLayout, sharding: jax.sharding.Sharding | None) -> LeafLayout:
    if sharding is None:
        return leaf
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, JaxMesh):
        return replace(leaf, mesh=Mesh.of(sharding.mesh), spec=sharding.spec)
    placed = []
    for device, slices in sharding.devices_indices_map(leaf.shape).items():
        bounds = [s.indices(n)[:2] for s, n in zip(slices, leaf.shape, strict=True)]
        placed.append((device.id, tuple(bounds)))
    return replace(leaf, placed=tuple(placed))


def _facts(leaf: LeafLayout) -> list[str]:
    """What is said of a single array, in lines."""
    facts = [f"{leaf.kind}: {leaf.dtype.name}{list(leaf.shape)}"]
    if leaf.mesh is not None:
        facts.append(f"  layout      {leaf.spec} on {leaf.mesh!r}")
        stored = stored_shape(leaf.shape, leaf.spec, leaf.mesh)
        if stored != leaf.shape:
            facts.append(f"  padded      stored as {leaf.dtype.name}{list(stored)}")
    facts += [
        f"  per device  {leaf.dtype.name}{list(leaf.local_shape)}",
        f"  bytes       {format_bytes(leaf.nbytes)} global, "
        f"{format_bytes(leaf.local_nbytes)} per device",
    ]
    if leaf.copies > 1:
        over = f" over {', '.join(leaf.replicated_over)}" if leaf.mesh else ""
        facts.append(f"  replicated {over}: {leaf.copies} copies of every element")
        from tessera.analysis.layout_figures import listed_ids

        block = leaf.block_at(0)
        same = [i for i in range(leaf.num_devices) if leaf.block_at(i) == block]
        ids = listed_ids([leaf.device_at(position) for position in same])
        facts.append(f"              devices {ids} hold the same block")
    return facts


def _cells(leaf: LeafLayout) -> list[str]:
    """One array as a row of the table of a tree."""
    return [
        f"{leaf.path}: {leaf.kind}" if leaf.path else leaf.kind,
        f"{leaf.dtype.name}{list(leaf.shape)}",
        str(leaf.spec) if leaf.mesh is not None else "-",
        str(list(leaf.local_shape)),
        format_bytes(leaf.nbytes),
        format_bytes(leaf.local_nbytes),
        ", ".join(leaf.replicated_over) or "-",
    ]


def _devices(leaf: LeafLayout) -> tuple[list[str], list[list[str]]]:
    """Which device holds which slice: header and rows, the middle of many left out."""
    axes = list(leaf.mesh.axes) if leaf.mesh is not None else []
    header = ["device", *axes, "slice"]
    count = leaf.num_devices
    shown = list(range(count))
    if count > MAX_DEVICES_LISTED:
        half = MAX_DEVICES_LISTED // 2
        shown = [*range(half), *range(count - half, count)]
    rows = [_device_row(leaf, position) for position in shown]
    if hidden := count - len(shown):
        rows.insert(
            len(shown) // 2, ["…", *("…" for _ in axes), f"{hidden} more devices"]
        )
    return header, rows


def _device_row(leaf: LeafLayout, position: int) -> list[str]:
    place = leaf.mesh.coordinates(position).values() if leaf.mesh is not None else ()
    return [
        str(leaf.device_at(position)),
        *map(str, place),
        _slice(leaf.block_at(position)),
    ]


def _slice(block: Block) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in block) + "]"


def _nbytes(shape: tuple[int, ...], dtype: Any) -> int:
    return math.prod(shape) * dtype.itemsize


def _is_tensor(value: object) -> bool:
    return isinstance(value, DistTensor)
