# SPDX-License-Identifier: Apache-2.0
"""The operand of a collective, and running the collective on it.

In an SPMD region an operand is a block, and a collective simply runs. A global array is
split by its own layout: ``jax.shard_map`` runs the collective on its blocks.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import jax
from jax import Array
from jax.sharding import PartitionSpec

from tessera.errors import (
    CollectiveError,
    DimError,
    NoMeshError,
    UnknownAxisError,
    did_you_mean,
)
from tessera.jax_compat.traces import manual_axes
from tessera.mesh import opened_or_none
from tessera.ops.operand_layouts import (
    Layout,
    as_array,
    is_unplaced,
    layout_of,
    map_blocks,
)
from tessera.shard import is_tensor
from tessera.shard_spec import axes_of_dims, spec_of_axes
from tessera.tracing import scope

Axis: TypeAlias = str | Sequence[str]
OutDim: TypeAlias = int | Literal["same"] | None


@dataclass(frozen=True)
class Operand:
    """One array and the axes of a collective on it.

    Attributes:
      value: A block in an SPMD region, otherwise a global array.
      axes: The collective's mesh axes, outer first.
      sizes: Their sizes.
      layout: Mesh and spec of a global array; None in an SPMD region.
    """

    value: Array
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    layout: Layout | None

    @property
    def is_block(self) -> bool:
        """Whether this is one device's block, in an SPMD region."""
        return self.layout is None

    @property
    def split_dim(self) -> int | None:
        """The dim of a global array that the axes split, or None."""
        if self.layout is None:
            return None
        for dim, names in enumerate(axes_of_dims(self.layout[1], self.value.ndim)):
            if set(self.axes) <= set(names):
                return dim
        return None

    def dim(self, dim: int | None, default: int | None = None) -> int:
        """A dim of the array, counted from the front.

        Raises:
          DimError: [T203] the array has no such dim.
          CollectiveError: [T206] no dim is given and there is no default.
        """
        dim = default if dim is None else dim
        rank = self.value.ndim
        if dim is None:
            raise CollectiveError(
                f"mesh axes {self.axes!r} split no dim of this array",
                got=f"shape {self.value.shape}, layout {self._spec}",
                fix="name a dim, with dim=",
            )
        if not -rank <= dim < rank:
            raise DimError(
                f"the operand has no dim {dim}",
                got=f"shape {self.value.shape}",
                fix=f"use a dim from {-rank} to {rank - 1}"
                if rank
                else "reshape the scalar to (1,) first",
            )
        return dim % rank

    def rank(self, rank: int) -> int:
        """A rank along the axes.

        Raises:
          CollectiveError: [T206] the axes have no such rank.
        """
        count = math.prod(self.sizes)
        if not 0 <= rank < count:
            raise CollectiveError(
                f"mesh axes {self.axes!r} have no rank {rank}",
                got=f"{count} devices along them",
                fix=f"use a rank from 0 to {count - 1}",
            )
        return int(rank)

    def run(
        self, on_block: Callable[..., Array], *settings: Any, out_dim: OutDim
    ) -> Array:
        """The result of ``on_block(block, axes, *settings)`` on every device.

        Args:
          on_block: What each device runs.
          *settings: Its further arguments; hashable.
          out_dim: The dim of the result that the axes split; None when every device
            has the same result; ``same`` when the layout is that of the operand.
        """
        if self.layout is None:
            return on_block(self.value, self.axes, *settings)
        mesh, spec = self.layout
        result = self._result_spec(out_dim)
        static = (self.axes, *settings)
        return map_blocks(on_block, static, (self.value,), mesh, (spec,), result)

    @property
    def _spec(self) -> PartitionSpec | None:
        return None if self.layout is None else self.layout[1]

    def _result_spec(self, out_dim: OutDim) -> PartitionSpec:
        """Layout of the result."""
        assert self._spec is not None, "a block has no layout of its own"
        before = axes_of_dims(self._spec, self.value.ndim)
        if out_dim != "same":
            after = [tuple(a for a in axes if a not in self.axes) for axes in before]
            if out_dim is not None:
                after[out_dim] += self.axes
            return spec_of_axes(after)
        missing = tuple(a for a in self.axes if not any(a in axes for axes in before))
        if missing and not before:
            raise CollectiveError(
                "the result of a scalar would differ from device to device",
                got=f"shape (), layout {self._spec}",
                fix="reshape the scalar to (1,) first",
            )
        return spec_of_axes((before[0] + missing, *before[1:]) if before else ())


def each(one: Callable[[Operand], Array], x: Any, axis: Axis) -> Any:
    """Run a collective on every leaf of a tree.

    Raises:
      UnknownAxisError: [T103] the mesh has no such axis.
      NoMeshError: [T106] an array without a layout, and no open mesh.
      CollectiveError: [T206] an axis that is named twice or is not manual here, or a
        traced array whose layout is not known.
    """
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    if not axes or len(set(axes)) < len(axes):
        raise CollectiveError(
            "a collective takes one mesh axis, or several different ones",
            got=f"axis {axis!r}",
            fix='write axis="dp", or axis=("node", "dp") with the outer axis first',
        )

    def leaf(value: Any) -> Array:
        return one(_operand(value, axes))

    return jax.tree.map(leaf, x, is_leaf=is_tensor)


def _operand(value: Any, axes: tuple[str, ...]) -> Operand:
    manual = manual_axes()
    if manual:
        _check_manual(axes, manual)
        sizes = tuple(manual[axis] for axis in axes)
        return Operand(as_array(value), axes, sizes, None)
    layout = layout_of(value)
    if layout is None and is_unplaced(value):
        raise CollectiveError(
            "a collective cannot see how this traced array is split",
            got=f"{jax.typeof(value)}, "
            + (
                "traced by a transformation that hides layouts"
                if scope.current() is None
                else "computed in a step that leaves its layout to the compiler"
            ),
            fix="leave it out, where the compiler is to insert it, or call it inside "
            "@op.kernel, where every device has its own block",
        )
    if layout is None:
        mesh = opened_or_none()
        if mesh is None:
            raise NoMeshError(
                "a collective needs a mesh, and the array is on none",
                got=f"axis {axes!r}",
                fix="open one with 'with mesh:', or give the array a layout",
            )
        layout = (mesh, PartitionSpec())
    mesh = layout[0]
    sizes = tuple(mesh.axis_size(axis) for axis in mesh.axis_tuple(axes))
    return Operand(as_array(value), axes, sizes, layout)


def _check_manual(axes: tuple[str, ...], manual: Any) -> None:
    for axis in axes:
        if axis in manual:
            continue
        known = jax.sharding.get_abstract_mesh().axis_names
        if axis in known:
            raise CollectiveError(
                f"mesh axis {axis!r} is not manual here",
                got=f"this region is manual over {', '.join(map(repr, manual))}",
                fix="name a manual axis: XLA partitions over the others",
            )
        raise UnknownAxisError(
            f"the mesh has no axis {axis!r}",
            got=f"this region is manual over {', '.join(map(repr, manual))}",
            fix=did_you_mean(axis, manual),
        )
