# SPDX-License-Identifier: Apache-2.0
"""Resolves the declared layout of every input and output of a function.

Declared layouts, the arrays' own and the rule for batches come together here: each
input and output of a graph gets its name and its checked layout.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import jax
import numpy as np
from jax.sharding import PartitionSpec

from tessera.errors import LayoutMismatchError, SpecFormError, did_you_mean
from tessera.foundations.device_grid import DATA_AXES
from tessera.foundations.tree import Skeleton, path_name
from tessera.graph.ir import Role, Value
from tessera.graph.tracer.argument_leaves import Leaf
from tessera.graph.tracer.arguments import Argument, Call, is_in
from tessera.graph.tracer.strategies import Strategy
from tessera.mesh import Mesh
from tessera.shard import DistTensor, ShardSpec
from tessera.shard_spec import axes_of_dims, check_even
from tessera.tracing.object_arguments import STRUCTURE

# What annotations call the dims of each array, by its path.
DimNames: TypeAlias = Mapping[str, Sequence[str]]
_NO_NAMES: DimNames = MappingProxyType({})
# The layout of arguments that layouts by position leave out.
UNDECLARED: Final = "undeclared"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is declared about a function besides its code.

    Attributes:
      name: What the graph and the compiled module are called.
      mesh: The mesh to run on; None takes the one that the arguments live on.
      in_specs: Layouts by argument name: a spec, or a tree of specs that is a prefix of
        the argument.
      in_spec: The layout of other arguments; ``UNDECLARED`` where they may have none.
      out_specs: Layouts of the result: a spec or a prefix tree; None leaves them to
        the partitioner.
      donate: Arguments whose memory the outputs may take over.
      strategy: Gives arguments layouts by their roles; see ``ts.distribute``.
      split_batch: Whether batches without a layout are split along their leading dim
        over the mesh's data axes.
      batch: Arguments that are batches, or paths in them; None: all of them.
      inferred: For arrays by path, whether they are a batch, inferred from a trace.
      keeps_unused: Whether the program takes arguments that it does not use.
      is_inlined: Whether a program that JAX traces has no call of it.
      compiler_options: Options of XLA for its program, by name.
    """

    name: str
    mesh: Mesh | None = None
    in_specs: Mapping[str, Any] = field(default_factory=dict)
    in_spec: Any = None
    out_specs: Any = None
    donate: frozenset[str] = frozenset()
    strategy: Strategy | None = None
    split_batch: bool = False
    batch: frozenset[str] | None = frozenset()
    inferred: Mapping[str, bool] = field(default_factory=dict)
    keeps_unused: bool = False
    is_inlined: bool = False
    compiler_options: tuple[tuple[str, bool | str], ...] = ()

    def check_names(self, signature: inspect.Signature) -> None:
        """Raise [T204] for options that name an argument that does not exist."""
        kinds = {name: p.kind for name, p in signature.parameters.items()}
        if inspect.Parameter.VAR_KEYWORD in kinds.values():
            return
        arguments = [
            n for n in kinds if kinds[n] is not inspect.Parameter.VAR_POSITIONAL
        ]
        has_more = len(arguments) < len(kinds)
        uses = dict.fromkeys(self.batch or (), "treat as a batch")
        uses |= dict.fromkeys((*self.in_specs, *self.donate), "lay out or donate")
        for name, use in uses.items():
            if has_more and name.startswith("args["):
                continue
            if name.partition("/")[0] not in arguments:
                raise SpecFormError(
                    f"{self.name!r} has no argument {name!r} to {use}",
                    fix=did_you_mean(name, arguments),
                )

    def is_batch(self, path: str) -> bool:
        """Whether an array of the arguments is declared or inferred to be a batch."""
        if path in self.inferred:
            return self.inferred[path]
        return self.batch is None or is_in(path, self.batch)

    def for_objects(self, call: Call) -> "Options":
        """The options for a call with arrays of NNX objects among its arguments.

        Trees of layouts name arrays as the objects do, and may leave some out. The type
        of an object is its role for a strategy.

        Raises:
          SpecFormError: [T204] a layout is for an array that an object does not have.
        """
        specs, roles = dict(self.in_specs), dict[str, str]()
        for argument in call.arguments:
            structure = argument.structure
            if structure is None:
                continue
            if not _is_spec(specs.get(argument.name)):
                specs[argument.name] = _object_specs(specs[argument.name], argument)
            if structure.role is not None:
                roles[argument.name] = structure.role
        if self.strategy is None:
            return replace(self, in_specs=specs)
        strategy = replace(self.strategy, declared=roles | dict(self.strategy.declared))
        return replace(self, in_specs=specs, strategy=strategy)

    @property
    def declares_layouts(self) -> bool:
        """Whether arguments or results have layouts of their own."""
        layouts = [*self.in_specs.values(), self.in_spec]
        has_inputs = any(layout not in (None, UNDECLARED) for layout in layouts)
        return has_inputs or self.out_specs is not None

    @property
    def needs_mesh(self) -> bool:
        """Whether its arrays are laid out on the mesh that is open around a call."""
        is_parallel = self.strategy is not None or self.split_batch
        return is_parallel or self.declares_layouts

    @property
    def lays_out(self) -> bool:
        """Whether there are such layouts, or a mesh."""
        return self.mesh is not None or self.declares_layouts


def argument_values(
    call: Call, options: Options, mesh: Mesh | None, dim_names: DimNames = _NO_NAMES
) -> tuple[Value, ...]:
    """The arrays of a call, each with the layout declared for it, or its own.

    Args:
      call: The call.
      options: What is declared.
      mesh: The mesh to lay arrays out on, if there is one.
      dim_names: The names that annotations give to the dims of arrays, by path.

    Raises:
      ShardDivisibilityError: [T201] a declared layout does not divide an array.
      SpecFormError: [T204] a tree of layouts does not fit its argument.
      LayoutMismatchError: [T205] arrays have other layouts than declared.
    """
    declared = declared_layouts(call, options, mesh, dim_names)
    strategy = options.strategy if mesh is not None else None
    values: list[Value] = []
    for argument in call.arguments:
        for leaf in argument.leaves:
            layout, gradient = declared[len(values)], None
            if strategy is not None and mesh is not None:
                gradient = strategy.gradient_layout(leaf, mesh)
            if layout is None:
                layout = _undeclared(leaf, options, mesh)
            donated = argument.name in options.donate
            values.append(
                Value(leaf.name, leaf.aval, layout, donated=donated, gradient=gradient)
            )
    return tuple(values)


def _undeclared(leaf: Leaf, options: Options, mesh: Mesh | None) -> Any:
    if leaf.layout is not None:
        own, spec = leaf.layout
        what = f"{leaf.name!r} has a layout that does not divide it"  # a type may
        check_even(what, leaf.aval.shape, spec, own)
        return spec
    if mesh is None or leaf.of_trace:
        return None
    may_be_batch = options.split_batch and not leaf.of_object
    is_split = may_be_batch and options.is_batch(leaf.name)
    return _batch_spec(leaf, mesh) if is_split else PartitionSpec()


def declared_layouts(
    call: Call, options: Options, mesh: Mesh | None, dim_names: DimNames = _NO_NAMES
) -> list[PartitionSpec | None]:
    """The layout that ``in_specs`` or a strategy declares for each array, or None."""
    layouts: list[PartitionSpec | None] = []
    wrong: list[str] = []
    for argument in call.arguments:
        specs = _specs(
            f"in_specs[{argument.name!r}]",
            _declared(argument, options),
            argument.tree,
            dict(argument.statics),
        )
        for leaf, spec in zip(argument.leaves, specs, strict=True):
            layout = _resolve(spec, leaf.name, leaf.aval, mesh, dim_names)
            own = leaf.layout
            if layout is None and mesh is not None and options.strategy is not None:
                layout = options.strategy.layout(leaf, mesh)
            layouts.append(layout)
            if mesh is None or layout is None or own is None:
                continue
            if not _alike(layout, own[1], mesh):
                wrong.append(f"{leaf.name}: declared {layout}, given {own[1]}")
    if wrong:
        raise LayoutMismatchError(
            f"{options.name!r} is given arrays that are not laid out as declared",
            got="\n".join(wrong),
            fix="move them first: jax.device_put(x, NamedSharding(mesh.jax, P(...)))\n"
            "or leave them out of in_specs, and they keep their own layout\n"
            "or declare the layout of those that a call returns in out_specs",
        )
    return layouts


def _declared(argument: Argument, options: Options) -> Any:
    declared = options.in_specs.get(argument.name, options.in_spec)
    if declared is not UNDECLARED:
        return declared
    if argument.leaves:
        raise SpecFormError(
            f"{options.name!r} has no layout for argument {argument.name!r}",
            got=f"layouts by position, for {', '.join(options.in_specs)}",
            fix="give one layout for each array argument, None to keep its own",
        )
    return None


def _batch_spec(leaf: Leaf, mesh: Mesh) -> PartitionSpec | None:
    axes = tuple(axis for axis in DATA_AXES if axis in mesh.axes)
    if not axes or not leaf.aval.shape:
        return PartitionSpec()
    return _resolve(ShardSpec((0,), (axes,)), leaf.name, leaf.aval, mesh)


def _alike(a: PartitionSpec, b: PartitionSpec, mesh: Mesh) -> bool:
    """Whether two layouts put the same parts on the same devices."""

    def split(spec: PartitionSpec) -> list[tuple[str, ...]]:
        dims = axes_of_dims(spec, max(len(a), len(b)))
        return [tuple(axis for axis in axes if mesh.shape[axis] > 1) for axes in dims]

    return split(a) == split(b)


def parameter_value(name: str, held: DistTensor, mesh: Mesh | None) -> Value:
    """The input that stands for a parameter."""
    aval = jax.ShapeDtypeStruct(held.shape, held.dtype)
    spec = None if mesh is None else held.spec
    return Value(name, aval, spec, Role.PARAMETER)


def output_values(
    options: Options,
    result: Skeleton,
    avals: Sequence[Any],
    mesh: Mesh | None,
    dim_names: DimNames = _NO_NAMES,
) -> tuple[Value, ...]:
    """The arrays of a result, with their names and declared layouts.

    Raises:
      SpecFormError: [T204] the tree of layouts does not fit the result.
      ShardDivisibilityError: [T201] a declared layout does not divide an array.
    """
    specs = _specs("out_specs", options.out_specs, result.structure, result.statics)
    names = result.names("result")
    return tuple(
        Value(name, aval, _resolve(spec, name, aval, mesh, dim_names))
        for name, aval, spec in zip(names, avals, specs, strict=True)
    )


def _resolve(
    spec: Any,
    name: str,
    aval: Any,
    mesh: Mesh | None,
    dim_names: DimNames = _NO_NAMES,
) -> PartitionSpec | None:
    if spec is None or mesh is None:
        return None
    shape, names = tuple(aval.shape), dim_names.get(name)
    if not isinstance(spec, PartitionSpec):
        return spec.resolve(shape, mesh, dim_names=names, what=repr(name))
    dims = ShardSpec(tuple(range(len(spec))), spec.partitions)
    resolved = dims.resolve(shape, mesh, what=repr(name))
    sums = mesh.axis_tuple([*spec.unreduced, *spec.reduced])
    if not set(sums) <= {*mesh.explicit_axes}:
        raise SpecFormError(
            f"{name!r} is declared to be unreduced or reduced over axes that are Auto",
            got=f"{spec} on the {mesh.topology}",
            fix="make the axes Explicit, as jax.make_mesh does",
        )
    return resolved.update(unreduced=spec.unreduced, reduced=spec.reduced)


def _specs(
    what: str, prefix: Any, structure: Any, statics: Mapping[int, Any]
) -> list[Any]:
    """One spec, or None, for each array of a tree, from a prefix tree of specs."""
    count = structure.num_leaves
    if _is_spec(prefix):
        return [prefix] * (count - len(statics))

    flat: list[Any] = []

    def spread_below(spec: Any, below: Any) -> None:
        flat.extend([spec] * len(jax.tree.leaves(below)))

    tree = jax.tree.unflatten(structure, range(count))
    try:
        jax.tree.map(spread_below, prefix, tree, is_leaf=_is_spec)
    except ValueError:
        raise SpecFormError(
            f"{what} is not a spec, nor a tree of specs that fits the arrays",
            got=_misfit(prefix, tree),
            fix="give one spec for all of them, or a tree with a spec or None for "
            "each branch",
        ) from None
    return [spec for place, spec in enumerate(flat) if place not in statics]


def _misfit(prefix: Any, tree: Any) -> str:
    """The arrays without a spec and the specs without an array, or both structures."""
    specs, arrays = (
        dict.fromkeys(path for path, _ in flat[0])
        for flat in (
            jax.tree_util.tree_flatten_with_path(prefix, _is_spec),
            jax.tree_util.tree_flatten_with_path(tree),
        )
    )
    missing = [p for p in arrays if not any(p[:n] in specs for n in range(len(p) + 1))]
    unknown = [s for s in specs if not any(p[: len(s)] == s for p in arrays)]
    parts = [
        f"{words} {', '.join(repr(path_name(path)) for path in paths)}"
        for words, paths in (("no spec for", missing), ("no array at", unknown))
        if paths
    ]
    return "; ".join(parts) or (
        f"specs {jax.tree.structure(prefix, is_leaf=_is_spec)}, "
        f"arrays {jax.tree.structure(tree)}"
    )


def _object_specs(specs: Any, argument: Argument) -> dict[str, Any]:
    """A spec, or None, for each array of an object, from a tree like its state."""
    given: dict[str, Any] = {}
    for path, spec in jax.tree_util.tree_flatten_with_path(specs, _is_spec)[0]:
        name = path_name(path)
        given[name] = spec
    known = argument.array_names
    for name in given:
        if name not in known:
            raise SpecFormError(
                f"in_specs[{argument.name!r}] has a layout for {name!r}, which is no "
                "array of it",
                fix=did_you_mean(name, [each for each in known if each != STRUCTURE]),
            )
    return {name: given.get(name) for name in known}


def _is_spec(node: Any) -> bool:
    return node is None or isinstance(node, (ShardSpec, PartitionSpec))


def is_number(leaf: Any) -> bool:
    """Whether a leaf of a result is an array or converts to one."""
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.dtype.kind not in "OSUMm"  # objects, strings, dates
    kinds = (bool, int, float, complex, jax.Array)
    return isinstance(leaf, kinds) or hasattr(type(leaf), "__jax_array__")


def is_numeric_array(leaf: Any) -> bool:
    """Whether a leaf is an array, or a NumPy number, and no number of Python."""
    return is_number(leaf) and not isinstance(leaf, (bool, int, float, complex))


def output_test(call: Call) -> Callable[[Any], bool]:
    """A test whether a leaf of the result of a call is an output of its program.

    Arrays and numbers are. Of the numbers, one that is among the arguments is not: it
    is static, and comes back as it went.
    """
    statics = [static for argument in call.arguments for _, static in argument.statics]
    passed = {id(static.value) for static in statics}
    numbers = (bool, int, float, complex)

    def is_output(leaf: Any) -> bool:
        is_passed = type(leaf) in numbers and id(leaf) in passed
        return is_number(leaf) and not is_passed

    return is_output
