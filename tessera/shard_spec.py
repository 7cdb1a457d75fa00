# SPDX-License-Identifier: Apache-2.0
"""ShardSpec: how an array is sharded over a mesh, with all validation.

Uses :mod:`tessera.mesh`; :mod:`tessera.shard` re-exports it.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from jax.sharding import NamedSharding, PartitionSpec

from tessera.errors import (
    AxisReusedError,
    DimError,
    ShardDivisibilityError,
    SpecFormError,
    TesseraError,
    UnknownAxisError,
    did_you_mean,
    nearest_multiples,
)
from tessera.mesh import AnyMesh, Mesh

Axes: TypeAlias = str | tuple[str, ...] | None


@dataclass(frozen=True)
class ShardSpec:
    """Which dims of an array are sharded over which mesh axes.

    Args:
      partition: The dims to shard: numbers (negative ones count from the end) or
        names. ``row`` and ``col`` are the second-last and the last dim; of a vector,
        ``row`` is its one dim. Other names come from the array's annotation.
      mesh_axes: For each of them a mesh axis, a tuple of axes (outer first), or None
        to leave the dim whole.

    Raises:
      SpecFormError: [T204] the two differ in length, or an entry is not a dim or axis.
      AxisReusedError: [T202] one mesh axis would shard two dims.

    Example:
      >>> spec = ShardSpec(partition=("row", "col"), mesh_axes=("tp", "dp"))
      >>> spec.resolve((1024, 512), Mesh(["tp", "dp"], devices=range(16)))
      P('tp', 'dp')
    """

    partition: Sequence[int | str]
    mesh_axes: Sequence[Axes]

    def __post_init__(self) -> None:
        dims = _entries(self.partition)
        axes = tuple(_axes_entry(entry) for entry in _entries(self.mesh_axes))
        object.__setattr__(self, "partition", dims)
        object.__setattr__(self, "mesh_axes", axes)
        if len(dims) != len(axes):
            raise SpecFormError(
                "a ShardSpec pairs every dim with mesh axes",
                got=f"{len(dims)} dims {dims!r}, {len(axes)} mesh axes {axes!r}",
                fix="give as many mesh axes as dims; None leaves a dim whole",
            )
        for dim in dims:
            if isinstance(dim, bool) or not isinstance(dim, (int, str)):
                raise SpecFormError(
                    "a partition entry is a dim number or a dim name",
                    got=f"{dim!r} in {dims!r}",
                    fix='write partition=("row", "col") or partition=(0, 1)',
                )
        used = [axis for entry in axes for axis in _axis_names(entry)]
        if reused := [axis for axis in dict.fromkeys(used) if used.count(axis) > 1]:
            raise AxisReusedError(
                f"mesh axis {reused[0]!r} is used twice in one ShardSpec",
                got=f"mesh_axes {axes!r}",
                fix="an axis splits one dim only: drop one of its uses",
            )

    @classmethod
    def replicated(cls) -> "ShardSpec":
        """The spec of a replicated array: every device holds all of it."""
        return cls((), ())

    @classmethod
    def of(cls, layout: "ShardSpec | PartitionSpec", what: str) -> "ShardSpec":
        """The spec of a declared layout, which may be a PartitionSpec.

        Args:
          layout: The layout.
          what: What it is of, for messages.

        Raises:
          SpecFormError: [T204] it is something else.
        """
        if isinstance(layout, ShardSpec):
            return layout
        is_jaxs = isinstance(layout, PartitionSpec)
        if is_jaxs and not (layout.unreduced or layout.reduced):
            return cls(tuple(range(len(layout))), layout.partitions)
        raise SpecFormError(
            f"the layout of {what} is no ShardSpec and no PartitionSpec",
            got=f"{layout!r}",
            fix='write ShardSpec(partition=("row",), mesh_axes=("dp",)), or P("dp")',
        )

    def resolve(
        self,
        shape: Sequence[int],
        mesh: AnyMesh,
        *,
        dim_names: Sequence[str] | None = None,
        what: str = "tensor",
    ) -> PartitionSpec:
        """The PartitionSpec for an array of one shape on one mesh, fully checked.

        Args:
          shape: The global shape.
          mesh: The mesh whose axes the spec names.
          dim_names: The array's own dim names, one per dim.
          what: The array's name in messages, such as ``parameter 'up'``.

        Returns:
          A PartitionSpec without trailing None.

        Raises:
          ShardDivisibilityError: [T201] a dim is not a multiple of its axes' size.
          DimError: [T203] the array has no such dim.
          SpecFormError: [T204] two entries name the same dim.
          UnknownAxisError: [T103] the mesh has no such axis.
        """
        mesh = Mesh.of(mesh)
        entries: list[tuple[str, ...]] = [()] * len(shape)
        named: dict[int, int | str] = {}
        problems: list[TesseraError] = []
        for name, axes in zip(self.partition, self.mesh_axes, strict=True):
            dim = _dim_number(name, len(shape), dim_names)
            if dim is None:
                problems.append(_no_such_dim(what, name, shape, dim_names))
            elif dim in named:
                problems.append(_dim_named_twice(what, dim, (named[dim], name)))
            else:
                named[dim], entries[dim] = name, _axis_names(axes)
                problems += _split_problems(what, shape, dim, entries[dim], mesh)
        _raise_all(problems)
        return spec_of_axes(entries)

    def named(
        self,
        shape: Sequence[int],
        mesh: AnyMesh,
        *,
        dim_names: Sequence[str] | None = None,
        what: str = "tensor",
    ) -> NamedSharding:
        """Like :meth:`resolve`, as a sharding on the devices of the mesh.

        Raises:
          AbstractMeshError: [T105] this machine lacks some of the devices.
        """
        spec = self.resolve(shape, mesh, dim_names=dim_names, what=what)
        return NamedSharding(Mesh.of(mesh).jax, spec)


def local_shape(
    shape: Sequence[int], spec: PartitionSpec, mesh: Mesh
) -> tuple[int, ...]:
    """Shape of one device's block of an array; the largest, if they differ.

    Example:
      >>> mesh = Mesh(["tp", "dp"], devices=range(16))
      >>> local_shape((8, 6), PartitionSpec("tp"), mesh)
      (2, 6)
      >>> local_shape((10, 6), PartitionSpec("tp"), mesh)
      (3, 6)
    """
    return tuple(
        -(-size // mesh.axis_size(axes))
        for size, axes in zip(shape, axes_of_dims(spec, len(shape)), strict=True)
    )


def check_even(
    what: str, shape: Sequence[int], spec: PartitionSpec, mesh: Mesh
) -> None:
    """Check that a layout divides an array into equal blocks.

    Args:
      what: The first line of the message.
      shape: The array's shape.
      spec: Its layout.
      mesh: Its mesh.

    Raises:
      ShardDivisibilityError: [T201] a dim is not a multiple of its axes' size.
    """
    _raise_all(
        [
            type(problem)(what, got=problem.got, fix=problem.fix)
            for dim, axes in enumerate(axes_of_dims(spec, len(shape)))
            for problem in _split_problems(what, shape, dim, axes, mesh)
        ]
    )


def axes_of_dims(spec: PartitionSpec, rank: int) -> tuple[tuple[str, ...], ...]:
    """The mesh axes of every dim, as tuples.

    Example:
      >>> axes_of_dims(PartitionSpec(("dp", "tp"), None), 3)
      (('dp', 'tp'), (), ())
    """
    own = spec.partitions if isinstance(spec, PartitionSpec) else spec
    entries = (*own, *(None,) * (rank - len(spec)))
    return tuple(_axis_names(entry) for entry in entries)


def spec_of_axes(axes: Iterable[tuple[str, ...]]) -> PartitionSpec:
    """The PartitionSpec with these mesh axes for each dim, without trailing None.

    Example:
      >>> spec_of_axes([("dp", "tp"), ("pp",), ()])
      P(('dp', 'tp'), 'pp')
    """
    entries = [names[0] if len(names) == 1 else names or None for names in axes]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def spec_over(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
    """A spec restricted to some axes.

    Example:
      >>> spec_over(PartitionSpec(("dp", "tp"), "cp"), ["dp", "cp"])
      P('dp', 'cp')
    """
    every = axes_of_dims(spec, len(spec))
    return spec_of_axes(tuple(a for a in names if a in axes) for names in every)


def spec_on(spec: PartitionSpec, mesh: Mesh, other: Mesh) -> PartitionSpec | None:
    """The same layout by the axes of another mesh of the same devices, in their order.

    Returns:
      None where the other mesh has no axes for it, or axes of either are Explicit, so
      that they are in the types of arrays.

    Example:
      >>> mesh = Mesh(["x", "y"], devices=range(8), shape=(4, 2))
      >>> spec_on(PartitionSpec("dp"), Mesh(["dp"], devices=range(8)), mesh)
      P(('x', 'y'),)
      >>> spec_on(PartitionSpec("y", "x"), mesh, Mesh(["dp"], devices=range(8)))
    """
    if mesh == other:
        return spec
    alike = (mesh.device_ids, mesh.target) == (other.device_ids, other.target)
    if not alike or mesh.explicit_axes or other.explicit_axes:
        return None
    own, others = _strides(mesh), _strides(other)
    entries: list[tuple[str, ...]] = []
    for axes in axes_of_dims(spec, len(spec)):
        entry: list[str] = []
        for start, end in _spans([own[axis] for axis in axes]):
            inside = [
                a for a in other.axes if start <= others[a][0] < others[a][1] <= end
            ]
            if math.prod(other.shape[a] for a in inside) * start != end:
                return None
            entry += inside
        entries.append(tuple(entry))
    return spec_of_axes(entries)


def _strides(mesh: Mesh) -> dict[str, tuple[int, int]]:
    """For each axis the distance of its neighbours, and after how many it repeats."""
    found: dict[str, tuple[int, int]] = {}
    stride = 1
    for axis in reversed(mesh.axes):
        found[axis] = stride, stride * mesh.shape[axis]
        stride *= mesh.shape[axis]
    return found


def _spans(strides: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The strides of the axes of one dim, neighbouring axes as one."""
    spans: list[tuple[int, int]] = []
    for start, end in strides:
        if spans and spans[-1][0] == end:
            end = spans.pop()[1]
        spans.append((start, end))
    return spans


# --- problems of a spec


def _raise_all(problems: list[TesseraError]) -> None:
    """Raise the first problem, with the others in its message."""
    if not problems:
        return
    first, *others = problems
    got = [first.got]
    for other in others:
        got.append(f"also [{other.code}] {other.what}: {other.got}")
    fix = "\n".join(dict.fromkeys(problem.fix for problem in problems))
    raise type(first)(first.what, got="\n".join(got), fix=fix)


def _split_problems(
    what: str,
    shape: Sequence[int],
    dim: int,
    axes: tuple[str, ...],
    mesh: Mesh,
) -> list[TesseraError]:
    """The problems with sharding one dim over some axes."""
    if unknown := [axis for axis in axes if axis not in mesh.axes]:
        return [
            UnknownAxisError(
                f"{what} is split over {axis!r}, an axis that the mesh lacks",
                got=f"dim {dim}, {mesh.topology}",
                fix=did_you_mean(axis, mesh.axes),
            )
            for axis in unknown
        ]
    if shape[dim] % mesh.axis_size(axes) == 0:
        return []
    return [_indivisible(what, shape, dim, axes, mesh)]


def _indivisible(
    what: str, shape: Sequence[int], dim: int, axes: tuple[str, ...], mesh: Mesh
) -> TesseraError:
    factor = mesh.axis_size(axes)
    product = " × ".join(f"{axis} {mesh.shape[axis]}" for axis in axes)
    near = nearest_multiples(factor, shape[dim])
    return ShardDivisibilityError(
        f"{what} cannot be split evenly over mesh axes {axes!r}",
        got=f"shape {tuple(shape)}, dim {dim} = {shape[dim]}, axis size {factor}"
        + (f" ({product})" if len(axes) > 1 else ""),
        fix=f"use {near}, or drop {' or '.join(map(repr, axes))} from the spec",
    )


def _no_such_dim(
    what: str, name: int | str, shape: Sequence[int], dim_names: Sequence[str] | None
) -> TesseraError:
    rank = len(shape)
    if isinstance(name, int):
        numbers = f"use a dim from {-rank} to {rank - 1}" if rank else "drop it"
        fix = f"{numbers}: the array has {rank} dims"
    else:
        names = [*(dim_names or ()), *("row", "col")[: min(rank, 2)]]
        fix = f"{did_you_mean(name, names)}, or a dim number"
    return DimError(f"{what} has no dim {name!r}", got=f"shape {tuple(shape)}", fix=fix)


def _dim_named_twice(what: str, dim: int, names: tuple[int | str, ...]) -> TesseraError:
    return SpecFormError(
        f"the spec of {what} names dim {dim} twice",
        got=f"{names[0]!r} and {names[1]!r} are the same dim",
        fix="join their mesh axes into one tuple, or drop one of them",
    )


def _dim_number(
    name: int | str, rank: int, dim_names: Sequence[str] | None
) -> int | None:
    """The number of the dim that an entry names, or None."""
    if isinstance(name, str):
        if dim_names is not None and name in dim_names:
            return list(dim_names).index(name)
        if rank == 1:
            return 0 if name == "row" else None
        name = {"row": -2, "col": -1}.get(name, rank)
    return name % rank if -rank <= name < rank else None


def _entries(entries: Any) -> tuple[Any, ...]:
    """Entries as a tuple; a single entry is a sequence of one."""
    return (entries,) if isinstance(entries, (str, int)) else tuple(entries)


def _axes_entry(entry: Any) -> Axes:
    if entry is None or isinstance(entry, str):
        return entry
    names = tuple(entry) if isinstance(entry, (tuple, list)) else ()
    if not names or not all(isinstance(name, str) for name in names):
        raise SpecFormError(
            "a mesh_axes entry is an axis name, a tuple of them, or None",
            got=f"{entry!r}",
            fix='write mesh_axes=("tp", None) or mesh_axes=(("dp", "tp"),)',
        )
    return names[0] if len(names) == 1 else names


def _axis_names(entry: Axes) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)
