# SPDX-License-Identifier: Apache-2.0
"""Strategies of ``ts.distribute``: layouts by the roles of arguments.

A strategy gives every array of the parameters, the gradients, the optimizer state and
the batch a layout: its own, changed over the strategy's axes. Roles are declared by the
user, or inferred from the traced function.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Final, Self

import jax
from jax.sharding import PartitionSpec

from tessera.analysis.memory import format_bytes
from tessera.errors import (
    StrategyError,
    TesseraWarning,
    UnknownAxisError,
    did_you_mean,
)
from tessera.graph.ir import Graph
from tessera.graph.tracer.argument_leaves import Leaf
from tessera.graph.tracer.argument_roles import updated_indices
from tessera.graph.tracer.arguments import Call, is_in
from tessera.graph.tracer.carried_state import (
    Subtree,
    is_array,
    layouts_of_results,
    results_in_parts,
)
from tessera.graph.tracer.strategy_roles import (
    BATCH,
    GRADIENTS,
    PARAMS,
    RoleInference,
    matches_weight,
)
from tessera.graph.zero_layouts import SPLIT_FROM, split_further
from tessera.mesh import Mesh, opened_or_none
from tessera.shard import ShardSpec
from tessera.shard_spec import axes_of_dims, spec_of_axes
from tessera.tracing import scope

# Replicating arrays of fewer bytes is no reason for a warning.
_LARGE: Final = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A strategy, for one function.

    Attributes:
      name: As in ``ts.distribute``.
      stage: From which of ``SPLIT_FROM`` on arrays are split: 0 splits none of them.
      axes: The mesh axes that it splits over; the batch over all of them, other arrays
        over the last.
      declared: Roles of arguments, or of parts of them by path, that the user declares.
      inferred: Roles of other arrays by path, inferred from the function.
    """

    name: str
    stage: int
    axes: tuple[str, ...]
    declared: Mapping[str, str] = field(default_factory=dict)
    inferred: Mapping[str, str] = field(default_factory=dict)

    def role(self, path: str) -> str | None:
        """The role of an array of the arguments, as far as that is known."""
        names = [name for name in self.declared if is_in(path, (name,))]
        return self.declared[max(names, key=len)] if names else self.inferred.get(path)

    def with_inferred_roles(self, graph: Graph, call: Call) -> Self:
        """The strategy, with roles inferred from the traced function.

        Raises:
          StrategyError: [T313] a role is declared for what the arguments do not have.
          UndecidedRoleError: [T324] the role of an array is undecided.
        """
        paths = [leaf.name for leaf in call.leaves]
        given = [path for argument in call.arguments for path in argument.paths]
        for name in self.declared:
            if not any(is_in(path, (name,)) for path in given):
                raise StrategyError(
                    f"{graph.name!r} is given no array {name!r}",
                    got=f"{self.declared[name]}={name!r}",
                    fix=did_you_mean(name, given),
                )
        declared = {
            p: role for p in paths if (role := replace(self, inferred={}).role(p))
        }
        inference = RoleInference(self.name, self.stage, declared, graph)
        return replace(self, inferred=inference.roles())

    def default_mesh(self) -> Mesh:
        """All devices, along the axis of the strategy."""
        return Mesh(self.axes[-1:])

    def mesh_here(self) -> Mesh:
        """The mesh of the open step, or else an open one, or the default."""
        here = scope.current()
        mesh = (here.mesh if here is not None else None) or opened_or_none()
        return mesh or self.default_mesh()

    def check_mesh(self, mesh: Mesh) -> None:
        """Check that a mesh has the axes.

        Raises:
          UnknownAxisError: [T103] it lacks one.
        """
        for axis in self.axes:
            if axis not in mesh.axes:
                raise UnknownAxisError(
                    f"strategy {self.name!r} is for an axis {axis!r}, which the mesh "
                    "lacks",
                    got=mesh.topology,
                    fix=f"name one of the mesh's: mesh_axes=[{mesh.axes[0]!r}]\n"
                    + did_you_mean(axis, mesh.axes),
                )

    def layout(self, leaf: Leaf, mesh: Mesh) -> PartitionSpec:
        """The layout of one array of the arguments."""
        own = leaf.spec
        role, shape = self.role(leaf.name), tuple(leaf.aval.shape)
        if role is None:
            return own
        spec = self._without_axes(own, len(shape))
        if role == BATCH:
            if not shape:
                return spec
            return ShardSpec((0,), (self.axes,)).resolve(
                shape, mesh, what=repr(leaf.name)
            )
        return self._split(role, spec, shape, mesh)

    def gradient_layout(self, leaf: Leaf, mesh: Mesh) -> PartitionSpec | None:
        """The layout of the gradient by an array, if it is a parameter."""
        if self.role(leaf.name) != PARAMS:
            return None
        shape = tuple(leaf.aval.shape)
        spec = self._without_axes(leaf.spec, len(shape))
        return self._split(GRADIENTS, spec, shape, mesh)

    def _split(
        self, role: str, spec: PartitionSpec, shape: Sequence[int], mesh: Mesh
    ) -> PartitionSpec:
        if self.stage < SPLIT_FROM[role]:
            return spec
        return split_further(spec, shape, mesh, self.axes[-1])

    def warn(self, call: Call, mesh: Mesh) -> None:
        """Warn where a large array that should be split stays whole.

        Warns:
          TesseraWarning: The axis divides none of its dims.
        """
        axis, size = self.axes[-1], mesh.shape[self.axes[-1]]
        for leaf in call.leaves if size > 1 else ():
            role, shape = self.role(leaf.name), tuple(leaf.aval.shape)
            if role not in SPLIT_FROM or self.stage < SPLIT_FROM[role]:
                continue
            layout = self.layout(leaf, mesh)
            is_split = any(axis in names for names in axes_of_dims(layout, 0))
            count = prod(shape) * leaf.aval.dtype.itemsize
            if not is_split and count >= _LARGE:
                warnings.warn(
                    f"strategy {self.name!r} leaves {leaf.name!r} of shape {shape} "
                    f"whole on each device, {format_bytes(count)}: {size} devices "
                    f"along {axis!r} divide none of its dims",
                    TesseraWarning,
                    stacklevel=2,
                )

    def _without_axes(self, spec: PartitionSpec, rank: int) -> PartitionSpec:
        """A layout without the strategy's axes, which a result may already have."""
        return spec_of_axes(
            tuple(axis for axis in axes if axis not in self.axes)
            for axes in axes_of_dims(spec, rank)
        )

    def with_results(self, graph: Graph, result: Any, call: Call) -> Graph:
        """A graph with layouts of its results; None for those like no argument.

        Args:
          graph: The function, as it was traced.
          result: The tree of its result: arrays as their types.
          call: The arguments.

        Raises:
          UndecidedRoleError: [T324] it is undecided what a result replaces.
        """
        assert graph.mesh is not None, "a strategy has a mesh"
        layouts = {leaf.name: self.layout(leaf, graph.mesh) for leaf in call.leaves}
        arguments = [
            Subtree.of(
                argument.rebuilt([leaf.aval for leaf in argument.leaves]),
                [leaf.name for leaf in argument.leaves],
            )
            for argument in call.arguments
            if any(
                self.role(leaf.name) not in (None, BATCH) for leaf in argument.leaves
            )
        ]
        count = sum(map(is_array, jax.tree.leaves(result)))
        names = [value.name for value in graph.outputs[:count]]
        whole = Subtree.of(result, names)
        parts = results_in_parts(whole, arguments)
        of = [{graph.inputs[i].name for i in f} for f in updated_indices(graph.program)]
        new = dict(zip(names, of[:count], strict=True))
        found = layouts_of_results(parts, arguments, layouts, new)
        pairs = zip(parts, found, strict=True)
        known = [
            layout
            for part, laid_out in pairs
            for key, layout in zip(part.keys, laid_out, strict=True)
            if key is not None
        ]
        returned = zip(graph.outputs[:count], known, strict=True)
        specs = [replace(value, spec=spec) for value, spec in returned]
        return graph.with_outputs([*specs, *graph.outputs[count:]])


@dataclass(frozen=True, kw_only=True)
class PipelineParallel(Strategy):
    """Weights are sharded over the pipeline's axis, and data is not."""

    def role(self, path: str) -> str:
        """The role of an array: what is not declared is the other of two roles."""
        other = PARAMS if BATCH in self.declared.values() else BATCH
        return super().role(path) or other

    def with_inferred_roles(self, graph: Graph, call: Call) -> Self:
        """The strategy itself: the pipelined call infers no roles."""
        del graph, call
        return self

    def layout(self, leaf: Leaf, mesh: Mesh) -> PartitionSpec:
        """The layout of one array of the arguments."""
        is_batch = self.role(leaf.name) == BATCH
        return leaf.spec if is_batch else super().layout(leaf, mesh)


@dataclass(frozen=True, kw_only=True)
class ExpertParallel(Strategy):
    """Experts are split along their leading dim, which counts them.

    The batch is split as well, and everything else is whole.

    Attributes:
      experts: Arguments that are experts, or parts of them by path.
      of_experts: Paths of these arrays, and of what is like them by path and shape,
        such as an optimizer's moments.
    """

    experts: tuple[str, ...] = ()
    of_experts: frozenset[str] = frozenset()

    def with_inferred_roles(self, graph: Graph, call: Call) -> Self:
        """The strategy, with roles inferred from the traced function.

        Raises:
          StrategyError: [T313] there are no such experts among the arguments.
        """
        shapes = {leaf.name: tuple(leaf.aval.shape) for leaf in call.leaves}
        for name in self.experts:
            if not any(is_in(path, (name,)) for path in shapes):
                raise StrategyError(
                    f"strategy {self.name!r} finds no experts {name!r}",
                    got=f"arrays {', '.join(shapes)}",
                    fix=did_you_mean(name, shapes),
                )
        experts = {path for path in shapes if is_in(path, self.experts)}
        alike = {
            path
            for path in shapes
            if any(matches_weight(path, shapes[path], e, shapes[e]) for e in experts)
        }
        found = super().with_inferred_roles(graph, call)
        return replace(found, of_experts=frozenset(experts | alike))

    def layout(self, leaf: Leaf, mesh: Mesh) -> PartitionSpec:
        """The layout of one array of the arguments."""
        return self._by_expert(super().layout(leaf, mesh), leaf, mesh)

    def gradient_layout(self, leaf: Leaf, mesh: Mesh) -> PartitionSpec | None:
        """The layout of the gradient by an array, if it is a parameter."""
        spec = super().gradient_layout(leaf, mesh)
        return spec if spec is None else self._by_expert(spec, leaf, mesh)

    def _by_expert(self, spec: PartitionSpec, leaf: Leaf, mesh: Mesh) -> PartitionSpec:
        shape = tuple(leaf.aval.shape)
        if not shape or leaf.name not in self.of_experts:
            return spec
        first, *rest = axes_of_dims(spec, len(shape))
        leading = (*first, *self.axes)
        ShardSpec((0,), (leading,)).resolve(shape, mesh, what=repr(leaf.name))
        return spec_of_axes([leading, *rest])
