# SPDX-License-Identifier: Apache-2.0
"""``dist.inspect``: shows where the blocks of an array, or of a whole tree, are.

It reads declarations and shardings, never values: a lazy tensor stays lazy, and a mesh
of devices that do not exist can be inspected like any other.
"""

import itertools
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding, PartitionSpec

from tessera.analysis.memory import format_bytes
from tessera.analysis.tables import aligned
from tessera.errors import OperandError
from tessera.foundations.device_grid import listed
from tessera.jax_compat import jaxprs
from tessera.mesh import Mesh
from tessera.shard import DistTensor, is_tensor, local_shape
from tessera.shard_spec import axes_of_dims
from tessera.tracing import scope

__all__ = ["Inspection", "LeafLayout", "inspect"]

MAX_DEVICES_LISTED = 16
# The (start, stop) of every dim.
Block: TypeAlias = tuple[tuple[int, int], ...]

_REPLICATED = PartitionSpec()

_COLUMNS = ("array", "global", "spec", "per device", "bytes", "local bytes", "copies")


@dataclass(frozen=True)
class LeafLayout:
    """The layout of one array.

    Attributes:
      path: Its path in the tree, such as ``['decoder']['up']``; empty for the root.
      kind: What it is: ``lazy tensor 'E'``, ``array``, ``NumPy array``, …
      dtype: NumPy dtype.
      shape: Global shape.
      mesh: The mesh it is on; None for one device, or where none is known.
      spec: Its layout over the mesh; replicated where there is none.
      unnamed_blocks: Device ids and the block of each, for devices that form no mesh.
      on_host: Whether it is in the memory of the devices' host.
    """

    path: str
    kind: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    mesh: Mesh | None = None
    spec: PartitionSpec = _REPLICATED
    unnamed_blocks: tuple[tuple[int, Block], ...] = ()
    on_host: bool = False

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of one device's block; the largest, if they differ."""
        if self.mesh is not None:
            return local_shape(self.shape, self.spec, self.mesh)
        if self.unnamed_blocks:
            return tuple(stop - start for start, stop in self.unnamed_blocks[0][1])
        return self.shape

    @property
    def nbytes(self) -> int:
        """Bytes of the global array."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def local_nbytes(self) -> int:
        """Bytes of one device's block."""
        return math.prod(self.local_shape) * self.dtype.itemsize

    @property
    def replicated_over(self) -> tuple[str, ...]:
        """The mesh axes along which devices have copies."""
        if self.mesh is None:
            return ()
        split = set(itertools.chain.from_iterable(self.axes))
        return tuple(axis for axis in self.mesh.axes if axis not in split)

    @property
    def copies(self) -> int:
        """How many devices have each element."""
        if self.mesh is not None:
            return self.mesh.axis_size(self.replicated_over)
        distinct = {block for _, block in self.unnamed_blocks}
        return max(1, len(self.unnamed_blocks) // max(1, len(distinct)))

    @property
    def num_devices(self) -> int:
        """How many devices have a block; 0 where none is known."""
        return len(self.unnamed_blocks) if self.mesh is None else self.mesh.size

    @cached_property
    def blocks(self) -> tuple[tuple[int, Block], ...]:
        """The id of each device and its block, in the order of the mesh."""
        if self.mesh is None:
            return self.unnamed_blocks
        ids = enumerate(self.mesh.device_ids)
        return tuple((device, self._block(position)) for position, device in ids)

    def block_at(self, position: int) -> Block:
        """The (start, stop) of every dim that the device at a position has."""
        return self.blocks[position][1]

    @property
    def axes(self) -> tuple[tuple[str, ...], ...]:
        """The mesh axes that split each dim."""
        return axes_of_dims(self.spec, len(self.shape))

    def _block(self, position: int) -> Block:
        assert self.mesh is not None
        coordinates, sizes = self.mesh.coordinates(position), self.mesh.shape
        block = []
        for axes, size, end in zip(
            self.axes, self.local_shape, self.shape, strict=True
        ):
            index = 0
            for axis in axes:
                index = index * sizes[axis] + coordinates[axis]
            # The type of an array may have a layout that does not divide it.
            block.append((min(index * size, end), min((index + 1) * size, end)))
        return tuple(block)


@dataclass(frozen=True, repr=False)
class Inspection:
    """The layouts of a tree of arrays; prints as text.

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
        """The part of ``local_nbytes`` that is in the memory of the device's host."""
        return sum(leaf.local_nbytes for leaf in self.leaves if leaf.on_host)

    @property
    def replicated_nbytes(self) -> int:
        """The part of ``local_nbytes`` that all devices of a larger mesh have."""
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
        summary = "\n".join(_summary(leaf))
        if not leaf.num_devices:
            return summary
        return f"{summary}\n\n{aligned(*_devices(leaf))}"

    __str__ = as_text
    __repr__ = as_text

    @property
    def _single(self) -> LeafLayout | None:
        """The one array, if an array and not a tree was inspected."""
        is_single = len(self.leaves) == 1 and not self.leaves[0].path
        return self.leaves[0] if is_single else None

    def _totals(self) -> list[str]:
        count = len(self.leaves)
        meshes = dict.fromkeys(leaf.mesh for leaf in self.leaves if leaf.mesh)
        totals = [
            f"{count} array{'' if count == 1 else 's'}: "
            f"{format_bytes(self.nbytes)} global, "
            f"{format_bytes(self.local_nbytes)} per device, of which "
            f"{format_bytes(self.replicated_nbytes)} whole on every device"
        ]
        if any(leaf.on_host for leaf in self.leaves):
            totals.append(f"{format_bytes(self.host_nbytes)} of it on the host")
        return [*totals, *(f"on {mesh!r}" for mesh in meshes)]


def inspect(tree: Any) -> Inspection:
    """Show how arrays are split: shapes, bytes, and which device has which slice.

    Args:
      tree: A lazy tensor; a JAX, NumPy, traced or abstract array; or any tree of them.

    Returns:
      An object that prints as text.

    Raises:
      OperandError: [T401] something in the tree is no array, such as a mesh.

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
    leaves = jax.tree.leaves_with_path(tree, is_leaf=is_tensor)
    return Inspection(tuple(_leaf(jax.tree_util.keystr(p), leaf) for p, leaf in leaves))


def _leaf(path: str, value: Any) -> LeafLayout:
    if not isinstance(value, (DistTensor, jax.Array, jax.ShapeDtypeStruct)):
        array = np.asarray(value)
        if array.dtype == object:
            raise OperandError(
                "dist.inspect shows arrays",
                got=f"{type(value).__name__} {path}".rstrip(),
                fix="pass an array, or a tree of arrays",
            )
        return LeafLayout(path, "NumPy array", array.dtype, array.shape)
    leaf = LeafLayout(path, "array", value.dtype, value.shape)
    if isinstance(value, DistTensor):
        kind = value.described if value.is_materialized else f"lazy {value.described}"
        return replace(leaf, kind=kind, mesh=value.mesh, spec=value.spec)
    if isinstance(value, jax.core.Tracer):
        mesh, spec = scope.layout_of(value) or (None, _REPLICATED)
        kind = "traced array" if mesh else "traced array of unknown layout"
        return replace(leaf, kind=kind, mesh=mesh, spec=spec)
    on_host = jaxprs.on_host(value)
    kind = "array" if isinstance(value, jax.Array) else "abstract array"
    if on_host:
        kind += " on the host"
    return _with_sharding(replace(leaf, kind=kind, on_host=on_host), value.sharding)


def _with_sharding(
    leaf: LeafLayout, sharding: jax.sharding.Sharding | None
) -> LeafLayout:
    if sharding is None:
        return leaf
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, JaxMesh):
        return replace(leaf, mesh=Mesh.of(sharding.mesh), spec=sharding.spec)
    blocks = []
    for device, slices in sharding.devices_indices_map(leaf.shape).items():
        bounds = [s.indices(n)[:2] for s, n in zip(slices, leaf.shape, strict=True)]
        blocks.append((device.id, tuple(bounds)))
    return replace(leaf, unnamed_blocks=tuple(blocks))


def _summary(leaf: LeafLayout) -> list[str]:
    """A single array in lines."""
    lines = [f"{leaf.kind}: {leaf.dtype.name}{list(leaf.shape)}"]
    if leaf.mesh is not None:
        lines.append(f"  layout      {leaf.spec} on {leaf.mesh!r}")
    lines += [
        f"  per device  {leaf.dtype.name}{list(leaf.local_shape)}",
        f"  bytes       {format_bytes(leaf.nbytes)} global, "
        f"{format_bytes(leaf.local_nbytes)} per device",
    ]
    if leaf.copies > 1:
        over = f" over {', '.join(leaf.replicated_over)}" if leaf.mesh else ""
        first = leaf.block_at(0)
        same = tuple(device for device, block in leaf.blocks if block == first)
        lines += [
            f"  replicated {over}: {leaf.copies} copies of every element",
            f"              devices {listed(same)} hold the same block",
        ]
    return lines


def _cells(leaf: LeafLayout) -> list[str]:
    """One array as a row of the table of a tree."""
    return [
        leaf.path if leaf.kind == "array" else f"{leaf.kind} {leaf.path}",
        f"{leaf.dtype.name}{list(leaf.shape)}",
        str(leaf.spec) if leaf.mesh is not None else "-",
        str(list(leaf.local_shape)),
        format_bytes(leaf.nbytes),
        format_bytes(leaf.local_nbytes),
        ", ".join(leaf.replicated_over) or "-",
    ]


def _devices(leaf: LeafLayout) -> tuple[list[str], list[list[str]]]:
    """Which device has which slice: header and rows, the middle of many left out."""
    mesh = leaf.mesh
    rows = []
    for position, (device, block) in enumerate(leaf.blocks):
        coordinates = mesh.coordinates(position).values() if mesh is not None else ()
        slices = ", ".join(f"{start}:{stop}" for start, stop in block)
        rows.append([str(device), *map(str, coordinates), f"[{slices}]"])
    header = ["device", *(mesh.axes if mesh is not None else ()), "slice"]
    if (hidden := len(rows) - MAX_DEVICES_LISTED) > 0:
        half = MAX_DEVICES_LISTED // 2
        gap = ["…"] * (len(header) - 1) + [f"{hidden} more devices"]
        rows = [*rows[:half], gap, *rows[-half:]]
    return header, rows
