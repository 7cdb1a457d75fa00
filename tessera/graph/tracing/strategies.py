# SPDX-License-Identifier: Apache-2.0
"""Strategies of ``ts.distribute``: layouts by what an argument is, not by its shape.

A strategy knows which arguments of a function are the parameters, the gradients, the
optimizer's state and the batch, by their names, and gives every array of them a layout:
the one that it comes with, and over the strategy's axes what the strategy says.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import PartitionSpec

from tessera.errors import StrategyError, UnknownAxisError, did_you_mean
from tessera.graph.tracing.arguments import Argument, Call, Leaf
from tessera.graph.zero import SPLIT_FROM, split_further
from tessera.mesh import Mesh
from tessera.shard import ShardSpec
from tessera.spec import axes_of_dims, spec_of_axes

PARAMS, GRADIENTS, STATE, BATCH = "params", "gradients", "optimizer_state", "batch"

# A result that is like several of them is the first that no earlier result is.
_RESULTS = (PARAMS, STATE, GRADIENTS)


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A strategy, for one function.

    Attributes:
      name: As in ``ts.distribute``.
      stage: From which of ``SPLIT_FROM`` on arrays are split: 0 splits none of them.
      axes: The mesh axes that it splits over; the batch over all of them, other arrays
        over the last.
      roles: What each argument is, by its name.
      results: What the results are, a role or None for each; None finds out.
    """

    name: str
    stage: int
    axes: tuple[str, ...]
    roles: Mapping[str, str] = field(default_factory=dict)
    results: tuple[str | None, ...] | None = None

    def default_mesh(self) -> Mesh:
        """Every device there is, along the axis of the strategy."""
        return Mesh(self.axes[-1:])

    def check_mesh(self, mesh: Mesh) -> None:
        """See that a mesh has the axes.

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

    def layout(self, argument: Argument, leaf: Leaf, mesh: Mesh) -> PartitionSpec:
        """The layout of one array of an argument."""
        own = leaf.layout[1] if leaf.layout else PartitionSpec()
        role, shape = self.roles.get(argument.name), tuple(leaf.aval.shape)
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

    def gradient_layout(
        self, argument: Argument, leaf: Leaf, mesh: Mesh
    ) -> PartitionSpec | None:
        """Where the gradient by an array lies, if it is a parameter."""
        if self.roles.get(argument.name) != PARAMS:
            return None
        own = leaf.layout[1] if leaf.layout else PartitionSpec()
        shape = tuple(leaf.aval.shape)
        return self._split(GRADIENTS, self._without_axes(own, len(shape)), shape, mesh)

    def _split(
        self, role: str, spec: PartitionSpec, shape: Sequence[int], mesh: Mesh
    ) -> PartitionSpec:
        if self.stage < SPLIT_FROM[role]:
            return spec
        return split_further(spec, shape, mesh, self.axes[-1])

    def _without_axes(self, spec: PartitionSpec, rank: int) -> PartitionSpec:
        """What others split, so that a result is laid out like what it replaces."""
        return spec_of_axes(
            tuple(axis for axis in axes if axis not in self.axes)
            for axes in axes_of_dims(spec, rank)
        )

    def result_layouts(
        self, result: Any, call: Call, mesh: Mesh
    ) -> list[PartitionSpec | None]:
        """The layout of each leaf of a result, None for what is like no argument.

        Args:
          result: The tree of the result: arrays as ``jax.ShapeDtypeStruct``.
          call: The arguments.
          mesh: The mesh of both.

        Raises:
          StrategyError: [T313] ``results`` is not of as many as there are.
        """
        given = {
            self.roles[argument.name]: argument
            for argument in reversed(call.arguments)
            if argument.name in self.roles
        }
        parts = self._parts(result, given)
        roles = self.results or _found_roles(parts, given)
        if len(roles) != len(parts):
            raise StrategyError(
                f"strategy {self.name!r} is told of {len(roles)} results",
                got=f"results={self.results!r}, and the function returns {len(parts)}",
                fix="give a role, or None, for each of them",
            )
        layouts: list[PartitionSpec | None] = []
        for role, part in zip(roles, parts, strict=True):
            argument = given.get(role or "")
            if argument is None:
                layouts += [None] * len(jax.tree.leaves(part))
                continue
            known = iter(self.layout(argument, leaf, mesh) for leaf in argument.leaves)
            layouts += [
                next(known) if _is_array(leaf) else None
                for leaf in jax.tree.leaves(_arrays(argument))
            ]
        return layouts

    def _parts(self, result: Any, given: Mapping[str, Argument]) -> list[Any]:
        """What has one role each: a result as a whole, or its elements."""
        forms = [_form(_arrays(given[role])) for role in _RESULTS if role in given]
        if self.results is None and _form(result) in forms:
            return [result]
        if isinstance(result, dict):
            return [result[name] for name in sorted(result)]
        return list(result) if isinstance(result, (list, tuple)) else [result]


@dataclass(frozen=True, kw_only=True)
class ExpertParallel(Strategy):
    """Experts are split along their leading dim, which counts them.

    They are what has ``expert`` at the beginning of a component of its path, such as
    ``weights/layer/experts/up``. Everything else is whole, and the batch is split.
    """

    def layout(self, argument: Argument, leaf: Leaf, mesh: Mesh) -> PartitionSpec:
        """The layout of one array of an argument."""
        return self._by_expert(
            super().layout(argument, leaf, mesh), argument, leaf, mesh
        )

    def gradient_layout(
        self, argument: Argument, leaf: Leaf, mesh: Mesh
    ) -> PartitionSpec | None:
        """Where the gradient by an array lies, if it is a parameter."""
        spec = super().gradient_layout(argument, leaf, mesh)
        return spec if spec is None else self._by_expert(spec, argument, leaf, mesh)

    def result_layouts(
        self, result: Any, call: Call, mesh: Mesh
    ) -> list[PartitionSpec | None]:
        """The layout of each leaf of a result, None for what is like no argument.

        Raises:
          StrategyError: [T313] there are parameters, and no experts among them.
        """
        given = [a for a in call.arguments if self.roles.get(a.name) == PARAMS]
        names = [leaf.name for argument in given for leaf in argument.leaves]
        if names and not any(map(_is_expert, names)):
            raise StrategyError(
                f"strategy {self.name!r} finds no experts among the parameters",
                got=", ".join(names),
                fix="keep them in a dict under 'experts': weights['experts']['up'] "
                "of shape [experts, in, out]\n"
                "op.moe lays its own experts out, and needs no strategy",
            )
        return super().result_layouts(result, call, mesh)

    def _by_expert(
        self, spec: PartitionSpec, argument: Argument, leaf: Leaf, mesh: Mesh
    ) -> PartitionSpec:
        shape, role = tuple(leaf.aval.shape), self.roles.get(argument.name)
        if role not in _RESULTS or not shape or not _is_expert(leaf.name):
            return spec
        first, *rest = axes_of_dims(spec, len(shape))
        leading = (*first, *self.axes)
        ShardSpec((0,), (leading,)).resolve(shape, mesh, what=repr(leaf.name))
        return spec_of_axes([leading, *rest])


def _is_expert(name: str) -> bool:
    return any(part.startswith("expert") for part in name.split("/"))


def _found_roles(
    parts: Sequence[Any], given: Mapping[str, Argument]
) -> list[str | None]:
    """What each part of a result is: the first free role that it is like."""
    free = [role for role in _RESULTS if role in given]
    found: list[str | None] = []
    for part in parts:
        alike = [role for role in free if _form(part) == _form(_arrays(given[role]))]
        found.append(alike[0] if alike else None)
        free = [role for role in free if role not in alike[:1]]
    return found


def _arrays(argument: Argument) -> Any:
    """An argument with types for its arrays."""
    return argument.rebuilt([leaf.aval for leaf in argument.leaves])


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _form(tree: Any) -> Any:
    """Structure, shapes and dtypes; nothing of a leaf that is no array."""
    leaves, structure = jax.tree.flatten(tree)
    forms = [(tuple(x.shape), x.dtype) if _is_array(x) else None for x in leaves]
    return structure, forms
