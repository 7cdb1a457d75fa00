# SPDX-License-Identifier: Apache-2.0
"""Stage 1: a callable and one call's arguments become a ``Graph``.

``jax.make_jaxpr`` traces the function. Arrays that it closes over, the tensors that it
captures and the parameters that its operations declare become inputs beside the
arguments, each with its name and layout; nothing is baked in as a constant.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.extend.core.primitives import copy_p
from jax.sharding import Mesh as JaxMesh

from tessera import _jax, scope
from tessera.annotations import Binding, bind
from tessera.errors import (
    NoMeshError,
    ParameterNameError,
    PipelineFormError,
    TesseraError,
    UnconnectedGradientError,
)
from tessera.graph.captures import lift_captures
from tessera.graph.ir import Graph, Role, Value
from tessera.graph.pipelining.mark import PipelineCall, pipeline_p
from tessera.graph.tracing.arguments import Call, Leaf, common_mesh
from tessera.graph.tracing.control_flow.steering import with_control_flow
from tessera.graph.tracing.declarations import (
    Options,
    argument_values,
    is_number,
    output_values,
    parameter_value,
)
from tessera.graph.tracing.gradient import gradient_p
from tessera.graph.tracing.strategies import Strategy
from tessera.graph.tracing.swapping import let_transpose_swap
from tessera.graph.tracing.write_back import Watch, Write, write_values
from tessera.mesh import Mesh, manual_axes, opened_or_none
from tessera.objects import check_references
from tessera.shard import DistTensor

# Two are usual: one that finds the parameters and one that has them.
_MOST_TRIALS = 9


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A traced call: the graph and what is needed to call it and read its result.

    Attributes:
      graph: The program with its inputs: arguments, then parameters, then arrays.
      parameters: The step's parameters, one for each parameter input, by name.
      donated: Arguments whose memory the outputs may take over.
      out_tree: Tree of the function's result.
      out_statics: Leaves of the result that are no arrays, by position.
      writes: What is given back to the caller's arguments, after the result.
    """

    graph: Graph
    parameters: dict[str, DistTensor]
    donated: frozenset[str]
    out_tree: Any
    out_statics: dict[int, Any]
    writes: tuple[Write, ...] = ()

    @property
    def returns_list(self) -> bool:
        """Whether the program returns a list of arrays, and not the result's tree."""
        return bool(self.out_statics or self.writes)

    def unflatten(self, arrays: Sequence[Any]) -> Any:
        """The function's result from the program's outputs."""
        rest, statics = iter(arrays), self.out_statics
        count = self.out_tree.num_leaves
        leaves = [statics[i] if i in statics else next(rest) for i in range(count)]
        return jax.tree.unflatten(self.out_tree, leaves)

    def written(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """The program's outputs for ``writes``."""
        return arrays[self.out_tree.num_leaves - len(self.out_statics) :]


def trace(function: Callable[..., Any], call: Call, options: Options) -> Trace:
    """Trace one call of a function, and check it against its annotations.

    Args:
      function: The user's function.
      call: Its arguments, taken apart.
      options: What is declared beside the code.

    Raises:
      ShardDivisibilityError: [T201] a declared layout does not divide an array.
      SpecFormError: [T204] a layout is declared for an argument that does not exist.
      ParameterNameError: [T305] the function declares other parameters every time.
      MeshConflictError: [T308] the inputs live on different meshes.
      AnnotationError: [T315] arguments or result do not fit the annotations.
      BranchError: [T318] the sides of a branch leave values of different types.
      ControlFlowError: [T319] Python has to decide on what is traced.
      WriteBackError: [T320] an argument was changed that cannot be given back.
    """
    _jax.hide_machinery()
    let_transpose_swap()
    statics = [value.value for each in call.arguments for _, value in each.statics]
    return with_control_flow(lambda: _trace(function, call, options), function, statics)


def _trace(function: Callable[..., Any], call: Call, options: Options) -> Trace:
    # What is open around a manual region is no mesh for the blocks inside it.
    opened = None if manual_axes() else opened_or_none()
    owners: list[tuple[str, Mesh | None]] = [("the step", options.mesh or opened)]
    if options.strategy is not None and common_mesh(call.leaves, owners) is None:
        owners.append(("the strategy", options.strategy.default_mesh()))
    known: dict[str, DistTensor] = {}
    before = known
    unreached: dict[int, frozenset[str]] = {}
    binding = bind(function, call.args, call.kwargs, name=options.name)
    for _ in range(_MOST_TRIALS):
        leaves = (*call.leaves, *map(Leaf, known, known.values()))
        mesh = common_mesh(leaves, owners)
        if options.strategy is not None and mesh is not None:
            options.strategy.check_mesh(mesh)
        arguments = argument_values(call, options, mesh, binding.dim_names)
        parameters = [parameter_value(name, known[name], mesh) for name in known]
        trial = _run(
            function,
            call,
            (*arguments, *parameters),
            mesh,
            unreached,
            donated=options.donate,
        )
        before, found = known, trial.scope.declared
        if _inputs_of(found) != _inputs_of(known):
            known = found  # the next trace has inputs for them
            continue
        graph = _graph(trial, (*arguments, *parameters), mesh, options, binding)
        if options.strategy is not None and options.out_specs is None:
            graph = _with_results(graph, trial, call, options.strategy)
        met = _meshes_met(trial, graph)
        if common_mesh(leaves, [*owners, *met]) != mesh:
            owners += met  # the next trace is on the mesh that this one met
            continue
        if mesh is None:
            _refuse_layouts(trial, options)
        missed = _unreached(graph.program)
        if not missed:
            return Trace(
                graph=_with_microbatch(graph, function, call, unreached),
                parameters=found,
                donated=options.donate,
                out_tree=trial.out_tree,
                out_statics=trial.out_statics,
                writes=tuple(trial.writes),
            )
        unreached |= missed  # the next trace leaves these gradients out
    raise ParameterNameError(
        f"the parameters of {options.name!r} are others every time that it is traced",
        got=f"{_listed(known)}, before {_listed(before)}",
        fix="name them after what they are: a step is traced more than once",
    )


def _listed(parameters: Mapping[str, DistTensor]) -> str:
    return ", ".join(map(repr, parameters)) or "none"


@dataclass
class _Trial:
    """One run of the function under the tracer."""

    scope: scope.Scope
    program: _jax.Program
    out_tree: Any
    out_statics: dict[int, Any]
    writes: list[Write]

    def result(self, arrays: Iterable[Any]) -> Any:
        """The function's result with something else in the place of its arrays."""
        rest, statics = iter(arrays), self.out_statics
        count = self.out_tree.num_leaves
        leaves = [statics[i] if i in statics else next(rest) for i in range(count)]
        return jax.tree.unflatten(self.out_tree, leaves)


def _run(
    function: Callable[..., Any],
    call: Call,
    values: Sequence[Value],
    mesh: Mesh | None,
    unreached: dict[int, frozenset[str]],
    *,
    row_parts: int | None = None,
    donated: frozenset[str] = frozenset(),
) -> _Trial:
    here = scope.Scope(
        mesh=mesh,
        unreached=unreached,
        plan=scope.current_plan(),
        row_parts=row_parts,
    )
    trial = _Trial(here, None, None, {}, [])
    names = [argument.name for argument in call.arguments]

    def flat(*arrays: Any) -> list[Any]:
        for array, value in zip(arrays, values, strict=True):
            if value.spec is not None and mesh is not None:
                scope.record_layout(array, mesh, value.spec)
            if value.gradient is not None and mesh is not None:
                scope.record_gradient_layout(array, mesh, value.gradient)
        count = len(call.leaves)
        here.values = {
            value.name: array
            for value, array in zip(values[count:], arrays[count:], strict=True)
        }
        args, kwargs = call.rebuilt(arrays[:count])
        watch = Watch([*args, *kwargs.values()], names, donated)
        with scope.carried_autocast():
            result = scope.as_called(function)(*args, **kwargs)
        leaves, trial.out_tree = jax.tree.flatten(result)
        check_references(leaves, ())
        trial.out_statics = {
            i: leaf for i, leaf in enumerate(leaves) if not is_number(leaf)
        }
        trial.writes, written = watch.changes()
        returned = [leaf for leaf in leaves if is_number(leaf)]
        return [jnp.asarray(leaf) for leaf in (*returned, *written)]

    _describe(flat, function, [value.name for value in values])
    with scope.opened(here), _jax.isolated_trace():
        trial.program = jax.make_jaxpr(flat)(*(_jax.struct(v.aval) for v in values))
    check_references((), _jax.constants(trial.program))
    return trial


def _describe(flat: Any, function: Callable[..., Any], names: list[str]) -> None:
    """Let JAX's errors speak of the user's function and arguments."""
    parameters: dict[str, inspect.Parameter] = {}
    for name in names:
        legal = re.sub(r"\W", "_", name)
        while legal in parameters:
            legal += "_"
        kind = inspect.Parameter.POSITIONAL_ONLY
        parameters[legal] = inspect.Parameter(legal, kind)
    flat.__wrapped__ = function
    flat.__signature__ = inspect.Signature(list(parameters.values()))


def _graph(
    trial: _Trial,
    inputs: Sequence[Value],
    mesh: Mesh | None,
    options: Options,
    binding: Binding,
) -> Graph:
    avals = [variable.aval for variable in _jax.outputs(trial.program)]
    result = trial.result(avals)
    binding.check_result(result)
    names = binding.result_dim_names(result)
    count = trial.out_tree.num_leaves - len(trial.out_statics)
    outputs = output_values(
        options, trial.out_tree, trial.out_statics, avals[:count], mesh, names
    )
    described = Graph(
        name=options.name,
        program=trial.program,
        mesh=mesh,
        inputs=tuple(inputs),
        outputs=(*outputs, *write_values(trial.writes, avals[count:], inputs)),
        plan=trial.scope.plan,
    )
    return described.with_program(trial.program)  # lifts what the trial captured


def _with_microbatch(
    graph: Graph,
    function: Callable[..., Any],
    call: Call,
    unreached: dict[int, frozenset[str]],
) -> Graph:
    """The graph, with the program of one microbatch where it has a pipeline."""
    calls = _pipelined_calls(graph.program)
    if not calls:
        return graph
    first = calls[0]
    weights = _weights(graph.program)
    inputs = zip(graph.inputs, _jax.inputs(graph.program), strict=True)
    # Layouts are left out: rows of a microbatch need not divide as the batch's do.
    values = [
        value if variable in weights else _one_microbatch(value, first)
        for value, variable in inputs
        if value.role is not Role.CAPTURED
    ]
    try:
        trial = _run(
            function, call, values, graph.mesh, unreached, row_parts=first.parts
        )
    except TesseraError:
        raise
    except (TypeError, ValueError) as error:
        raise _no_rows_of_a_batch(first, str(error).partition("\n")[0]) from error
    for whole, micro in zip(calls, _pipelined_calls(trial.program), strict=False):
        if whole.rows != micro.rows:
            raise _no_rows_of_a_batch(first, f"{micro.rows} rows in {whole.rows}")
    program, _ = lift_captures(trial.program)
    return replace(graph, microbatch=program)


def _pipelined_calls(program: _jax.Program) -> list[PipelineCall]:
    """Every pipelined call in a program, nested programs included."""
    found: list[PipelineCall] = []
    for equation in _jax.equations(program):
        if equation.primitive is pipeline_p:
            found.append(equation.params["call"])
        for inner in _jax.inner_programs(equation):
            found += _pipelined_calls(inner)
    return found


def _weights(program: _jax.Program) -> set[Any]:
    """What has no rows, however long it is: weights of gradients and of pipelines."""
    found: set[Any] = set()
    for equation in _jax.equations(program):
        if equation.primitive is gradient_p:
            found.update(equation.invars[1:])
        elif equation.primitive is pipeline_p:
            found.update(equation.invars[equation.params["call"].staged.num_inputs :])
    # By a copy of its own ts.value_and_grad differentiates.
    found.update(
        equation.invars[0]
        for equation in _jax.equations(program)
        if equation.primitive is copy_p and equation.outvars[0] in found
    )
    return {atom for atom in found if not isinstance(atom, _jax.Literal)}


def _one_microbatch(value: Value, call: PipelineCall) -> Value:
    shape = value.aval.shape
    if value.role is Role.PARAMETER or shape[:1] != (call.rows,):
        return value
    rows = call.rows // call.parts
    aval = jax.ShapeDtypeStruct((rows, *shape[1:]), value.aval.dtype)
    return replace(value, aval=aval, spec=None)


def _no_rows_of_a_batch(call: PipelineCall, problem: str) -> PipelineFormError:
    return PipelineFormError(
        "a step with a pipeline cannot be traced for one microbatch",
        got=f"{call.rows // call.parts} of {call.rows} rows of each "
        f"argument that has {call.rows}: {problem}",
        fix="give the pipeline the rows of the step's arguments, as many and in the "
        "same order",
    )


def _with_results(graph: Graph, trial: _Trial, call: Call, strategy: Strategy) -> Graph:
    """The graph with the layouts that a strategy gives its results."""
    assert graph.mesh is not None, "a strategy has a mesh"
    result = trial.result(value.aval for value in graph.outputs)
    layouts = strategy.result_layouts(result, call, graph.mesh)
    known = [layout for i, layout in enumerate(layouts) if i not in trial.out_statics]
    returned, written = graph.outputs[: len(known)], graph.outputs[len(known) :]
    laid_out = [replace(v, spec=s) for v, s in zip(returned, known, strict=True)]
    return graph.with_outputs([*laid_out, *written])


def _refuse_layouts(trial: _Trial, options: Options) -> None:
    """Raise [T106] where layouts are declared and there is no mesh to hold them."""
    names = [options.name] if options.declares_layouts else []
    names += [name for name, _ in trial.scope.inner]
    if names:
        raise NoMeshError(
            f"{' and '.join(map(repr, names))} has in_specs or out_specs, and no mesh",
            fix="pass mesh=, call it inside 'with mesh:', or give it arrays that live "
            "on a mesh",
        )


def _inputs_of(parameters: Mapping[str, DistTensor]) -> list[Any]:
    """What the inputs for some parameters look like, in order."""
    return [
        (name, held.shape, held.dtype, held.mesh, held.spec)
        for name, held in parameters.items()
    ]


# --- which mesh the function brings along


def _meshes_met(trial: _Trial, graph: Graph) -> list[tuple[str, Mesh | None]]:
    """Meshes that a trace met: of inner functions, captured arrays, manual regions."""
    met = list(trial.scope.inner)
    names = [value.name for value in graph.inputs if value.role is Role.CAPTURED]
    for leaf in map(Leaf, names, graph.captured):
        if leaf.layout is not None:
            met.append((leaf.name, leaf.layout[0]))
    regions = set() if graph.mesh or met else _meshes_of_regions(graph.program)
    # Several grids of the same devices are the user's own; none of them is the step's.
    if len(regions) == 1:
        met.append(("a manual region", Mesh.of(regions.pop())))
    return met


def _meshes_of_regions(program: _jax.Program) -> set[JaxMesh]:
    meshes: set[JaxMesh] = set()
    for equation in _jax.equations(program):
        sharding = equation.params.get("sharding")
        for mesh in (equation.params.get("mesh"), getattr(sharding, "mesh", None)):
            if isinstance(mesh, JaxMesh):
                meshes.add(mesh)
        for inner in _jax.inner_programs(equation):
            meshes |= _meshes_of_regions(inner)
    return meshes


# --- which parameters a loss reaches


def _unreached(program: _jax.Program) -> dict[int, frozenset[str]]:
    """For each ``graph.backward``, the parameters that its loss does not depend on."""
    found: dict[int, frozenset[str]] = {}

    def visit(program: _jax.Program) -> None:
        for place, equation in enumerate(_jax.equations(program)):
            if equation.primitive is gradient_p and "call" in equation.params:
                sources = _jax.sources(program, equation.invars[0], before=place)
                names, weights = equation.params["names"], equation.invars[1:]
                found[equation.params["call"]] = frozenset(
                    name
                    for name, weight in zip(names, weights, strict=True)
                    if weight not in sources
                )
                if not sources.intersection(weights):
                    _refuse_loss(equation)
            for inner in _jax.inner_programs(equation):
                visit(inner)

    visit(program)
    return {call: names for call, names in found.items() if names}


def _refuse_loss(mark: _jax.Equation) -> NoReturn:
    names = mark.params["names"]
    line = _jax.source_line(mark)
    raise UnconnectedGradientError(
        "the loss depends on no trainable parameter of the step",
        got=f"none of {len(names)}: {', '.join(map(repr, names[:3]))}"
        + (", …" if len(names) > 3 else "")
        + (f"\ngraph.backward was called at {line}" if line else ""),
        fix="compute the loss from them, at the level where graph.backward is called",
    )
