# SPDX-License-Identifier: Apache-2.0
"""Stage 1: a callable and one call's arguments become a ``Graph``.

``jax.make_jaxpr`` traces the function. Arrays that it closes over, the tensors that it
captures and the parameters that its operations declare become inputs beside the
arguments, each with its name and layout; nothing is baked in as a constant.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from tessera import _jax, scope
from tessera.errors import SpecFormError, did_you_mean
from tessera.graph.ir import Graph, Role, Value
from tessera.graph.tracing.arguments import Call, Leaf, common_mesh
from tessera.graph.tracing.gradient import gradient_p
from tessera.mesh import Mesh, opened_or_none
from tessera.shard import DistTensor, ShardSpec

DATA_AXES = ("dp", "fsdp")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is declared of a function beside its code.

    Attributes:
      name: What the graph and the compiled module are called.
      mesh: The mesh to run on; None takes the one that the arguments live on.
      in_specs: Layouts by argument name: a spec, or a tree of specs that is a prefix of
        the argument.
      out_specs: Layouts of the result: a spec or a prefix tree; None leaves them to
        the partitioner.
      donate: Arguments whose memory the outputs may take over.
      split_batch: Whether arguments without a layout are split along their leading dim
        over the mesh's data axes.
    """

    name: str
    mesh: Mesh | None = None
    in_specs: Mapping[str, Any] = field(default_factory=dict)
    out_specs: Any = None
    donate: frozenset[str] = frozenset()
    split_batch: bool = False


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A traced call: the graph and what is needed to call it and read its result.

    Attributes:
      graph: The program with its inputs: arguments, then parameters, then arrays.
      parameters: The step's parameters, one for each parameter input, by name.
      captured: The closed-over arrays, one for each captured input.
      donated: Arguments whose memory the outputs may take over.
      out_tree: Tree of the function's result.
      out_statics: Leaves of the result that are no arrays, by position.
    """

    graph: Graph
    parameters: dict[str, DistTensor]
    captured: tuple[Any, ...]
    donated: frozenset[str]
    out_tree: Any
    out_statics: dict[int, Any]

    def unflatten(self, arrays: Sequence[Any]) -> Any:
        """The function's result from the program's outputs."""
        rest = iter(arrays)
        total = len(arrays) + len(self.out_statics)
        leaves = [
            self.out_statics[i] if i in self.out_statics else next(rest)
            for i in range(total)
        ]
        return jax.tree.unflatten(self.out_tree, leaves)


def trace(function: Callable[..., Any], call: Call, options: Options) -> Trace:
    """Trace one call of a function.

    Args:
      function: The user's function.
      call: Its arguments, taken apart.
      options: What is declared beside the code.

    Raises:
      ShardDivisibilityError: [T201] a declared layout does not divide an array.
      SpecFormError: [T204] a layout is declared for an argument that does not exist.
      MeshConflictError: [T308] the inputs live on different meshes.
    """
    _jax.hide_machinery()
    given = options.mesh or opened_or_none()
    known: dict[str, DistTensor] = {}
    unreached: dict[int, frozenset[str]] = {}
    while True:
        held = [Leaf(name, tensor) for name, tensor in known.items()]
        mesh = common_mesh((*call.leaves, *held), given)
        arguments = _argument_values(call, options, mesh)
        parameters = [_parameter_value(name, known[name]) for name in known]
        trial = _run(function, call, (*arguments, *parameters), mesh, unreached)
        found = trial.scope.declared
        if _inputs_of(found) != _inputs_of(known):
            known = found  # the next trace has inputs for them
            continue
        missed = _unreached(trial.program)
        if not missed:
            return _finish(trial, (*arguments, *parameters), mesh, options)
        unreached |= missed  # the next trace leaves these gradients out


@dataclass
class _Trial:
    """One run of the function under the tracer."""

    scope: scope.Scope
    program: _jax.Program
    out_paths: list[Any]
    out_tree: Any
    out_statics: dict[int, Any]


def _run(
    function: Callable[..., Any],
    call: Call,
    values: Sequence[Value],
    mesh: Mesh | None,
    unreached: dict[int, frozenset[str]],
) -> _Trial:
    here = scope.Scope(mesh=mesh, unreached=unreached)
    trial = _Trial(here, None, [], None, {})

    def flat(*arrays: Any) -> list[Any]:
        for array, value in zip(arrays, values, strict=True):
            if value.spec is not None and mesh is not None:
                scope.record_layout(array, mesh, value.spec)
        count = len(call.leaves)
        here.values = {
            value.name: array
            for value, array in zip(values[count:], arrays[count:], strict=True)
        }
        args, kwargs = call.rebuilt(arrays[:count])
        result = function(*args, **kwargs)
        paths, trial.out_tree = jax.tree_util.tree_flatten_with_path(result)
        leaves = [leaf for _, leaf in paths]
        trial.out_statics = {
            i: leaf for i, leaf in enumerate(leaves) if not _is_number(leaf)
        }
        trial.out_paths = [
            p for i, (p, _) in enumerate(paths) if i not in trial.out_statics
        ]
        return [jnp.asarray(leaf) for leaf in leaves if _is_number(leaf)]

    with scope.opened(here):
        trial.program = jax.make_jaxpr(flat)(*(_jax.struct(v.aval) for v in values))
    return trial


def _finish(
    trial: _Trial, values: Sequence[Value], mesh: Mesh | None, options: Options
) -> Trace:
    program, captured = _jax.lift_constants(trial.program)
    inputs = [
        *values,
        *(_captured_value(i, array, mesh) for i, array in enumerate(captured)),
    ]
    names = [_path_name("result", path) for path in trial.out_paths]
    avals = [variable.aval for variable in _jax.outputs(program)]
    specs = _specs(
        options.out_specs,
        jax.tree.unflatten(trial.out_tree, range(trial.out_tree.num_leaves)),
        trial.out_statics,
    )
    outputs = [
        Value(name, aval, _resolve(spec, name, aval, mesh))
        for name, aval, spec in zip(names, avals, specs, strict=True)
    ]
    graph = Graph(
        name=options.name,
        program=program,
        mesh=mesh,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
    )
    return Trace(
        graph=graph,
        parameters=trial.scope.declared,
        captured=tuple(captured),
        donated=options.donate,
        out_tree=trial.out_tree,
        out_statics=trial.out_statics,
    )


# --- what is known of each input


def _inputs_of(parameters: Mapping[str, DistTensor]) -> list[Any]:
    """What the inputs for some parameters look like, in order."""
    return [
        (name, held.shape, held.dtype, held.mesh, held.spec)
        for name, held in parameters.items()
    ]


def _argument_values(
    call: Call, options: Options, mesh: Mesh | None
) -> tuple[Value, ...]:
    known = [argument.name for argument in call.arguments]
    for name in (*options.in_specs, *options.donate):
        if name not in known:
            raise SpecFormError(
                f"{options.name!r} has no argument {name!r} to lay out or donate",
                fix=did_you_mean(name, known),
            )
    values = []
    for argument in call.arguments:
        tree = argument.rebuilt(list(argument.leaves))
        declared = _specs(
            options.in_specs.get(argument.name),
            tree,
            dict(argument.statics),
            is_leaf=_is_argument_leaf,
        )
        for leaf, spec in zip(argument.leaves, declared, strict=True):
            aval, own = leaf.aval, leaf.layout
            if spec is not None:
                layout = _resolve(spec, leaf.name, aval, mesh)
            elif own is not None:
                layout = own[1]
            elif options.split_batch:
                layout = _batch_spec(leaf.name, aval, mesh)
            else:
                layout = None if mesh is None else PartitionSpec()
            donated = argument.name in options.donate
            values.append(Value(leaf.name, aval, layout, donated=donated))
    return tuple(values)


def _batch_spec(name: str, aval: Any, mesh: Mesh | None) -> PartitionSpec | None:
    if mesh is None:
        return None
    axes = tuple(axis for axis in DATA_AXES if axis in mesh.axes)
    if not axes or not aval.shape:
        return PartitionSpec()
    return _resolve(ShardSpec((0,), (axes,)), name, aval, mesh)


def _parameter_value(name: str, held: DistTensor) -> Value:
    aval = jax.ShapeDtypeStruct(held.shape, held.dtype)
    spec = None if held.mesh is None else held.spec
    return Value(name, aval, spec, Role.PARAMETER)


def _captured_value(index: int, array: Any, mesh: Mesh | None) -> Value:
    leaf = Leaf(f"captured_{index}", array)
    layout = leaf.layout
    spec = layout[1] if layout else (None if mesh is None else PartitionSpec())
    return Value(leaf.name, jax.typeof(array), spec, Role.CAPTURED)


def _resolve(
    spec: Any, name: str, aval: Any, mesh: Mesh | None
) -> PartitionSpec | None:
    if spec is None or mesh is None:
        return None
    if isinstance(spec, PartitionSpec):
        spec = ShardSpec(tuple(range(len(spec))), tuple(spec))
    return spec.resolve(tuple(aval.shape), mesh, what=repr(name))


def _specs(
    prefix: Any,
    tree: Any,
    statics: Mapping[int, Any],
    is_leaf: Callable[[Any], bool] | None = None,
) -> list[Any]:
    """One spec, or None, for each array of a tree, from a prefix tree of specs."""

    def spread_below(spec: Any, below: Any) -> list[_Spec]:
        return [_Spec(spec)] * len(jax.tree.leaves(below, is_leaf=is_leaf))

    spread = jax.tree.map(spread_below, prefix, tree, is_leaf=_is_spec)
    flat = [leaf.spec for leaf in jax.tree.leaves(spread)]
    return [spec for place, spec in enumerate(flat) if place not in statics]


@dataclass(frozen=True)
class _Spec:
    """A box, so that a missing spec is a leaf of its tree like any other."""

    spec: Any


def _is_argument_leaf(node: Any) -> bool:
    return isinstance(node, Leaf)


def _is_spec(node: Any) -> bool:
    return node is None or isinstance(node, (ShardSpec, PartitionSpec))


def _path_name(root: str, path: Any) -> str:
    inner = jax.tree_util.keystr(path, simple=True, separator="/")
    return f"{root}/{inner}" if inner else root


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, (bool, int, float, complex)) or hasattr(leaf, "dtype")


# --- which parameters a loss reaches


def _unreached(program: _jax.Program) -> dict[int, frozenset[str]]:
    """For each ``graph.backward``, the parameters that its loss does not depend on."""
    found: dict[int, frozenset[str]] = {}

    def visit(program: _jax.Program) -> None:
        for place, equation in enumerate(_jax.equations(program)):
            if equation.primitive is gradient_p and "call" in equation.params:
                sources = _jax.sources(program, equation.invars[0], before=place)
                found[equation.params["call"]] = frozenset(
                    name
                    for name, weight in zip(
                        equation.params["names"], equation.invars[1:], strict=True
                    )
                    if weight not in sources
                )
            for _, inner in _jax.nested(equation):
                visit(inner)

    visit(program)
    return {call: names for call, names in found.items() if names}
