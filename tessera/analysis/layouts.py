# SPDX-License-Identifier: Apache-2.0
"""``dist.inspect``: where the parts of an array, or of a whole tree, lie.

It reads declarations and shardings, never values: a lazy tensor stays lazy, and a mesh
of devices that do not exist can be looked at like any other.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding, PartitionSpec

from tessera import _jax, scope
from tessera.analysis.memory import format_bytes
from tessera.analysis.placement_html import as_html
from tessera.analysis.tables import aligned
from tessera.mesh import Mesh
from tessera.shard import DistTensor, local_shape
from tessera.spec import axes_of_dims

MAX_DEVICES_LISTED = 16

Block = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class LeafLayout:
    """Where one array lies.

    Attributes:
      path: Way to it in the tree, such as ``['decoder']['up']``; empty for the root.
      kind: ``lazy tensor``, ``tensor``, ``array``, ``traced`` or ``numpy``.
      dtype: Its name.
      shape: Global shape.
      local_shape: Shape of one device's block.
      nbytes: Bytes of the global array.
      local_nbytes: Bytes of one device's block.
      mesh: The mesh it is on; None for one device, or for none that is known.
      spec: Its layout over the mesh; None where there is no mesh.
    """

    path: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    nbytes: int
    local_nbytes: int
    mesh: Mesh | None
    spec: PartitionSpec | None

    @property
    def axes(self) -> tuple[tuple[str, ...], ...]:
        """The mesh axes of every dim."""
        spec = PartitionSpec() if self.spec is None else self.spec
        return axes_of_dims(spec, len(self.shape))

    @property
    def replicated_over(self) -> tuple[str, ...]:
        """The mesh axes along which devices hold copies."""
        if self.mesh is None:
            return ()
        used = {axis for axes in self.axes for axis in axes}
        return tuple(axis for axis in self.mesh.axes if axis not in used)

    @property
    def copies(self) -> int:
        """How many devices hold each element."""
        if self.mesh is None:
            return 1
        return self.mesh.axis_size(self.replicated_over)

    @property
    def num_devices(self) -> int:
        """How many devices hold a block."""
        return 1 if self.mesh is None else self.mesh.size

    def block_of(self, position: int) -> Block:
        """The (start, stop) of every dim that the device at a mesh position holds."""
        if self.mesh is None:
            return tuple((0, size) for size in self.shape)
        shape = self.mesh.shape
        places = np.unravel_index(position, tuple(shape.values()))
        place = dict(zip(shape, map(int, places), strict=True))
        bounds = []
        for axes, size in zip(self.axes, self.local_shape, strict=True):
            index = 0
            for axis in axes:
                index = index * shape[axis] + place[axis]
            bounds.append((index * size, (index + 1) * size))
        return tuple(bounds)


@dataclass(frozen=True, repr=False)
class Inspection:
    """What :func:`inspect` found; prints as text, and as HTML in a notebook.

    Attributes:
      leaves: One entry per array, in the order of the tree.
      is_tree: Whether the inspected object holds arrays rather than being one.
    """

    leaves: tuple[LeafLayout, ...]
    is_tree: bool

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all global arrays."""
        return sum(leaf.nbytes for leaf in self.leaves)

    @cached_property
    def local_nbytes(self) -> int:
        """Bytes of all blocks of one device."""
        return sum(leaf.local_nbytes for leaf in self.leaves)

    @cached_property
    def replicated_nbytes(self) -> int:
        """Those bytes of one device that every other device of the mesh holds too."""
        return sum(
            leaf.local_nbytes
            for leaf in self.leaves
            if leaf.mesh is not None and leaf.copies == leaf.mesh.size > 1
        )

    def as_text(self) -> str:
        """The inspection as aligned plain text."""
        return (
            self._tree_text() if self.is_tree else "\n".join(_array_lines(*self.leaves))
        )

    def __str__(self) -> str:
        return self.as_text()

    def __repr__(self) -> str:
        return self.as_text()

    def _repr_html_(self) -> str:
        return as_html(self)

    def _tree_text(self) -> str:
        header, right = [*_COLUMNS], ["bytes", "per device"]
        lines = [aligned(header, map(cells, self.leaves), right=right)]
        lines.append("")
        lines.append(self.summary)
        lines += [_mesh_line(mesh) for mesh in self.meshes]
        return "\n".join(lines)

    @property
    def summary(self) -> str:
        """Totals, in one line."""
        count = f"{len(self.leaves)} array{'s' if len(self.leaves) != 1 else ''}"
        return (
            f"{count}: {format_bytes(self.nbytes)} global, "
            f"{format_bytes(self.local_nbytes)} per device, of which "
            f"{format_bytes(self.replicated_nbytes)} whole on every device"
        )

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        """The meshes of the arrays, each once."""
        found = (leaf.mesh for leaf in self.leaves if leaf.mesh is not None)
        return tuple(dict.fromkeys(found))


def inspect(tree: Any) -> Inspection:
    """Show how an array is split: shapes, bytes, and which device holds which slice.

    Args:
      tree: A lazy tensor, a JAX array, a traced or abstract array, a NumPy array, or
        any tree of them.

    Returns:
      An object that prints as text and renders in a notebook.

    Example:
      >>> from tessera.shard import ShardSpec, tensor
      >>> mesh = Mesh(["tp", "dp"], devices=range(4))
      >>> rows = ShardSpec(partition=("row",), mesh_axes=("tp",))
      >>> table = tensor((10_000_000, 4096), rows, mesh, dtype="bf16", name="E")
      >>> print(inspect(table))
      lazy tensor 'E', bfloat16[10000000,4096]
        layout      P('tp') on tp × dp mesh, 2 × 2
        per device  bfloat16[5000000,4096]
        bytes       76.3 GiB global, 38.1 GiB per device
        replicated  over dp: 2 copies
      <BLANKLINE>
      device  tp  dp  slice
      0       0   0   [0:5000000, 0:4096]
      1       0   1   [0:5000000, 0:4096]
      2       1   0   [5000000:10000000, 0:4096]
      3       1   1   [5000000:10000000, 0:4096]
    """
    paths, structure = jax.tree.flatten_with_path(tree, is_leaf=_is_tensor)
    leaves = tuple(_leaf(jax.tree_util.keystr(path), leaf) for path, leaf in paths)
    return Inspection(leaves, is_tree=not jax.tree_util.treedef_is_leaf(structure))
