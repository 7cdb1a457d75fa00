# SPDX-License-Identifier: Apache-2.0
"""Traces a function for the arguments of one call: callable -> ``Graph``.

``jax.make_jaxpr`` traces the function. Arrays that it closes over, tensors that it
captures and parameters that its operations declare become inputs besides the arguments,
each with its name and layout; nothing is baked in as a constant. A function is traced
again as long as a trace finds something that the next one needs: parameters, a mesh,
the roles of arguments.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from tessera.errors import NoMeshError, ParameterNameError
from tessera.foundations.tree import Skeleton, partition
from tessera.graph.gradient_primitive import unreached_parameters
from tessera.graph.ir import Graph, Role, Value
from tessera.graph.pipelining.pipeline_primitive import has_pipeline
from tessera.graph.tracer.argument_leaves import Leaf
from tessera.graph.tracer.argument_roles import gradient_uses
from tessera.graph.tracer.arguments import Call, is_in
from tessera.graph.tracer.control_flow.autograph import with_control_flow
from tessera.graph.tracer.control_flow.printing import require_known
from tessera.graph.tracer.declared_layouts import (
    DimNames,
    Options,
    argument_values,
    output_test,
    output_values,
    parameter_value,
)
from tessera.graph.tracer.mesh_hints import hints
from tessera.graph.tracer.mesh_inference import (
    Owned,
    captured_leaves,
    common_mesh,
    mesh_of,
    meshes_used,
)
from tessera.graph.tracer.microbatch_trace import BatchRows
from tessera.graph.tracer.strategy_roles import BATCH
from tessera.graph.tracer.torch_transpose import enable_torch_transpose
from tessera.graph.tracer.write_back import MutationTracker, Write, write_values
from tessera.jax_compat import equation_lines, jaxprs
from tessera.mesh import Mesh
from tessera.ops.operand_layouts import in_types_of, layout_of
from tessera.shard import DistTensor
from tessera.tracing import casts, scope
from tessera.tracing.mutable_arrays import refuse_on_one_device
from tessera.tracing.object_arguments import as_it_is, split_result

# Usually two: one that finds the parameters and one with inputs for them.
_MAX_TRACES = 9


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A traced call: the graph and what is needed to call it and read its result.

    Attributes:
      graph: The program with its inputs: arguments, then parameters, then arrays.
      parameters: The step's parameters, one for each parameter input, by name.
      donated: Arguments whose memory the outputs may take over.
      keeps_unused: Whether the program takes arguments that it does not use.
      result: The function's result without its arrays.
      restore: Puts objects that the function created in the place of their arrays.
      writes: What is written back to the caller's arguments; outputs after the result.
    """

    graph: Graph
    parameters: dict[str, DistTensor]
    donated: frozenset[str]
    keeps_unused: bool
    result: Skeleton
    restore: Callable[[Any], Any]
    writes: tuple[Write, ...] = ()

    def unflatten(self, arrays: Sequence[Any]) -> Any:
        """The function's result from the program's outputs."""
        return self.restore(self.result.combine(arrays))

    def written(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """The program's outputs for ``writes``."""
        return arrays[self.result.num_arrays :]


def trace(function: Callable[..., Any], call: Call, options: Options) -> Trace:
    """Trace one call of a function, and check it against its annotations.

    Args:
      function: The user's function.
      call: Its flattened arguments.
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
    equation_lines.hide_library_frames()
    enable_torch_transpose()
    statics = [value.value for each in call.arguments for _, value in each.statics]
    return with_control_flow(lambda: _trace(function, call, options), function, statics)


def _trace(function: Callable[..., Any], call: Call, options: Options) -> Trace:
    tracing = _Tracing(function, call, options)
    before: Mapping[str, DistTensor] = {}
    for _ in range(_MAX_TRACES):
        before = tracing.parameters
        if (found := tracing.trace_once()) is not None:
            return found
    raise ParameterNameError(
        f"the parameters of {options.name!r} are others every time that it is traced",
        got=f"{_listed(tracing.parameters)}, before {_listed(before)}",
        fix="name them after what they are: a step is traced more than once",
    )


class _Tracing:
    """The successive traces of one call, with what the earlier ones found."""

    def __init__(
        self, function: Callable[..., Any], call: Call, options: Options
    ) -> None:
        self.function, self.call, self.options = function, call, options
        self.leaves = list(call.leaves)  # and arrays that the function closes over
        self.parameters: dict[str, DistTensor] = {}
        self.unreached: dict[int, frozenset[str]] = {}
        self.weights: dict[str, bool] | None = None
        self.binding = call.bound_to(function, options.name)
        self.owners: list[Owned] = [("the step", mesh_of(options))]
        if options.strategy is not None and self._common_mesh() is None:
            self.owners.append(("the strategy", options.strategy.default_mesh()))

    def trace_once(self) -> Trace | None:
        """The traced call; None where this trace found what the next one needs."""
        options, mesh = self._options(), self._common_mesh()
        self.call = self.call.on_mesh(mesh)
        if options.strategy is not None and mesh is not None:
            options.strategy.check_mesh(mesh)
        inputs = (
            *argument_values(self.call, options, mesh, self.binding.dim_names),
            *(parameter_value(name, p, mesh) for name, p in self.parameters.items()),
        )
        here = self._scope(mesh)
        run = self._run(inputs, here)
        is_new = self._infer_weights(run.program, inputs)
        if is_new or _inputs_of(here.declared) != _inputs_of(self.parameters):
            self.parameters = here.declared  # the next trace has inputs for them
            return None
        graph = _graph(run, inputs, mesh, options)
        found, captured = meshes_used(graph, here.inner), captured_leaves(graph)
        if self._common_mesh(found, captured) != mesh:
            self.owners += found  # the next trace is on the mesh that this one found
            self.leaves += captured
            return None
        if mesh is None:
            _refuse_layouts(run, options)
        if missed := unreached_parameters(graph.program):
            self.unreached |= missed  # the next trace leaves these gradients out
            return None
        if self._infer_roles(graph):
            return None
        if has_pipeline(graph.program):
            graph = replace(graph, microbatch=self._rows(graph).microbatch())
        if options.strategy is not None and mesh is not None:
            options.strategy.warn(self.call, mesh)
            if options.out_specs is None:
                result = run.result.combine(value.aval for value in graph.outputs)
                graph = options.strategy.with_results(graph, result, self.call)
        return Trace(
            graph=graph,
            parameters=here.declared,
            donated=options.donate,
            keeps_unused=options.keeps_unused,
            result=run.result,
            restore=run.restore,
            writes=tuple(run.writes),
        )

    def _options(self) -> Options:
        """The options; no batch is split before it is known to be one."""
        is_known = self.weights is not None or not self._asks_for_weights
        return self.options if is_known else replace(self.options, split_batch=False)

    @property
    def _asks_for_weights(self) -> bool:
        """Whether all arguments but those differentiated by are batches."""
        return self.options.split_batch and self.options.batch is None

    def _infer_weights(self, program: jaxprs.Program, inputs: Sequence[Value]) -> bool:
        """Infer what gradients are taken by; whether that is news."""
        if not self._asks_for_weights:
            return False
        before, by = self.weights, gradient_uses(program).differentiated
        pairs = zip(inputs, jaxprs.inputs(program), strict=True)
        # Parameters are no arguments, so they are no batches anyway.
        self.weights = {
            value.name: False
            for value, x in pairs
            if x in by and value.role is Role.ARGUMENT
        }
        self.options = replace(self.options, inferred=self.weights)
        return self.weights != before

    def _infer_roles(self, graph: Graph) -> bool:
        """Infer the roles of arguments; whether there are new ones."""
        before = self.options
        if before.strategy is not None:
            found = before.strategy.with_inferred_roles(graph, self.call)
            self.options = replace(before, strategy=found)
        return self.options != before

    def _common_mesh(
        self, found: Sequence[Owned] = (), captured: Sequence[Leaf] = ()
    ) -> Mesh | None:
        held = self.parameters
        leaves = (*self.leaves, *captured, *map(Leaf, held, held.values()))
        return common_mesh(leaves, [*self.owners, *found])

    def _scope(self, mesh: Mesh | None, *, is_whole_batch: bool = True) -> scope.Scope:
        return scope.Scope(
            mesh=mesh,
            unreached=self.unreached,
            plan=scope.plan_of(self.options.compiler_options),
            is_whole_batch=is_whole_batch,
        )

    def _run(self, values: Sequence[Value], here: scope.Scope) -> "_TraceRun":
        """Trace the function once for inputs of these types and layouts."""
        mesh, call, binding = here.mesh, self.call, self.binding
        run = _TraceRun(here, None, Skeleton(None, {}), as_it_is, [], {})
        names, donate = [a.name for a in call.arguments], self.options.donate
        is_output = output_test(call)

        def flat(*arrays: Any) -> list[Any]:
            for array, value in zip(arrays, values, strict=True):
                if value.spec is not None and mesh is not None:
                    scope.record_layout(array, mesh, value.spec)
                if value.gradient is not None and mesh is not None:
                    scope.record_layout(array, mesh, value.gradient, of_gradient=True)
            count = len(call.leaves)
            here.values = {
                value.name: array
                for value, array in zip(values[count:], arrays[count:], strict=True)
            }
            args, kwargs = call.rebuilt(arrays[:count])
            watch = MutationTracker([*args, *kwargs.values()], names, donate)
            with casts.carried_autocast():
                result = scope.resolve_callee(self.function)(*args, **kwargs)
            result, run.restore = split_result(result)
            returned, run.result = partition(result, is_output)
            returned = list(map(jnp.asarray, returned))
            if binding.result_hint is not None:
                run.dim_names = binding.result_dim_names(run.result.combine(returned))
                if here.is_whole_batch:  # one microbatch has other sizes
                    binding.check_result(run.result.combine(returned))
            run.writes, written = watch.changes()
            skeletons = [run.result, *(write.skeleton for write in run.writes)]
            require_known([leaf for s in skeletons for leaf in s.statics.values()])
            here.forget_values()
            return [*returned, *map(jnp.asarray, written)]

        _describe(flat, self.function, [value.name for value in values])
        with (
            hints(mesh),
            scope.opened(here),
            jaxprs.isolated_trace(),
            in_types_of(mesh),
        ):
            run.program = jax.make_jaxpr(flat)(*(v.type_on(mesh) for v in values))
        return run

    def _rows(self, graph: Graph) -> BatchRows:
        def retrace(values: Sequence[Value], here: scope.Scope) -> jaxprs.Program:
            return self._run(values, here).program

        def opened() -> scope.Scope:
            return self._scope(graph.mesh, is_whole_batch=False)

        return BatchRows(graph, self._may_be_batch, retrace, opened)

    def _may_be_batch(self, path: str) -> bool:
        """Whether an array has no other declared or inferred role."""
        options = self.options
        if options.strategy is not None:
            return options.strategy.role(path) in (None, BATCH)
        return not options.batch or is_in(path, options.batch)


def _listed(parameters: Mapping[str, DistTensor]) -> str:
    return ", ".join(map(repr, parameters)) or "none"


@dataclass
class _TraceRun:
    """One run of the function under the tracer."""

    scope: scope.Scope
    program: jaxprs.Program
    result: Skeleton
    restore: Callable[[Any], Any]
    writes: list[Write]
    dim_names: DimNames


def _describe(flat: Any, function: Callable[..., Any], names: list[str]) -> None:
    """Let JAX's errors name the user's function and arguments."""
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
    run: _TraceRun, inputs: Sequence[Value], mesh: Mesh | None, options: Options
) -> Graph:
    avals = [variable.aval for variable in jaxprs.outputs(run.program)]
    count = run.result.num_arrays
    outputs = output_values(options, run.result, avals[:count], mesh, run.dim_names)
    described = Graph(
        name=options.name,
        program=run.program,
        mesh=mesh,
        inputs=tuple(inputs),
        outputs=(*outputs, *write_values(run.writes, avals[count:], inputs)),
        plan=run.scope.plan,
    )
    graph = described.with_program(run.program)  # lifts what the run captured
    if mesh is not None and mesh.size > 1:
        for array in graph.captured:
            if layout_of(array) is None:
                refuse_on_one_device(array)
    return graph


def _refuse_layouts(run: _TraceRun, options: Options) -> None:
    """Raise [T106] where layouts are declared and there is no mesh."""
    names = [options.name] if options.declares_layouts else []
    names += [name for name, _ in run.scope.inner]
    if names:
        raise NoMeshError(
            f"{' and '.join(map(repr, names))} has in_specs or out_specs, and no mesh",
            fix="pass mesh=, call it inside 'with mesh:', or give it arrays that live "
            "on a mesh",
        )


def _inputs_of(parameters: Mapping[str, DistTensor]) -> list[Any]:
    """The types of the inputs for some parameters, in order."""
    return [
        (name, held.shape, held.dtype, held.mesh, held.spec)
        for name, held in parameters.items()
    ]
