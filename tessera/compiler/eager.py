# SPDX-License-Identifier: Apache-2.0
"""Eager execution under ``jax.disable_jit()``: runs a function operation by operation.

The body runs once, on concrete arrays, so ``print``, a debugger and Python's ``if``
work in it. Arguments and results get their declared layouts, mutations are written
back, and ``ts.grad`` differentiates the operations recorded so far. Features that need
a pass over the whole program, pipelines and autocast, are refused.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from tessera import casts, scope
from tessera._jax_recording import Recording, register_eager_rule
from tessera.compiler.gradient_primitive import (
    gradient_p,
    unconnected_error,
    unreached_error,
)
from tessera.compiler.ir import Graph, Value
from tessera.compiler.pipelining.pipeline_primitive import pipeline_p
from tessera.compiler.trace.arguments import Call
from tessera.compiler.trace.declared_layouts import (
    Options,
    argument_values,
    is_number,
    output_test,
    output_values,
)
from tessera.compiler.trace.mesh_inference import common_mesh, open_mesh
from tessera.compiler.trace.torch_transpose import enable_torch_transpose
from tessera.compiler.trace.tracer import trace
from tessera.compiler.trace.write_back import MutationTracker, Write, write_values
from tessera.errors import OutsideTraceError
from tessera.mesh import Mesh
from tessera.object_arguments import split_result
from tessera.shard import DistTensor
from tessera.tree import partition

# Returns the array of a parameter, from its name and declaration.
Provide: TypeAlias = Callable[[str, DistTensor], Any]


@dataclass(frozen=True)
class EagerResult:
    """The result of a function that ran operation by operation.

    Attributes:
      result: Its result.
      writes: What it assigned into its arguments.
      written: The arrays of that.
    """

    result: Any
    writes: Sequence[Write]
    written: Sequence[Any]


@dataclass
class _EagerScope(scope.Scope):
    """The scope of a function that runs eagerly."""

    recording: Recording = field(default_factory=Recording)
    provide: Provide = lambda name, declared: declared.materialize()

    def value_of(self, name: str) -> Any:
        """The array of a declared parameter, which is made when it is first used."""
        if name not in self.values:
            with self.recording.left():
                made = self.provide(name, self.declared[name])
            self.values[name] = self.recording.array(made)
        return self.values[name]

    def unreached_parameters(
        self, call: int, loss: Any, weights: Mapping[str, Any]
    ) -> Collection[str]:
        """The parameters that a loss does not depend on."""
        reached = self.recording.reached(loss, list(weights.values()))
        if weights and not any(reached):
            raise unreached_error(list(weights))
        return {
            name
            for name, is_reached in zip(weights, reached, strict=True)
            if not is_reached
        }


def run_eagerly(
    function: Callable[..., Any], call: Call, options: Options, provide: Provide
) -> EagerResult:
    """Run a function on the arrays of a call, one operation after the other.

    Args:
      function: The user's function.
      call: Its flattened arguments.
      options: What is declared beside the code.
      provide: Gives the arrays of parameters.

    Raises:
      OutsideTraceError: [T302] it needs what a pass does with a whole program.
      UnconnectedGradientError: [T303] a loss does not depend on a weight.
      WriteBackError: [T320] an argument was changed that cannot be given back.
    """
    enable_torch_transpose()
    casts.check_autocast_of_programs(casts.current_autocast())
    binding = call.bound_to(function, options.name)
    graph = None if options.strategy is None else _traced(function, call, options)
    if graph is not None:
        mesh, values = graph.mesh, graph.inputs[: len(call.leaves)]
    else:
        mesh = _mesh_of(call, options)
        values = argument_values(call, options, mesh, binding.dim_names)
    recording = Recording()
    here = _EagerScope(
        mesh=mesh,
        plan=scope.plan_of(options.is_deterministic),
        is_eager=True,
        recording=recording,
        provide=provide,
    )
    arrays = [
        recording.array(_placed(leaf.value, mesh, value.spec))
        for leaf, value in zip(call.leaves, values, strict=True)
    ]
    args, kwargs = call.rebuilt(arrays)
    names = [argument.name for argument in call.arguments]
    watch = MutationTracker([*args, *kwargs.values()], names, options.donate)
    with scope.opened(here), recording.entered():
        for array, value in zip(arrays, values, strict=True):
            if value.spec is not None and mesh is not None:
                scope.record_layout(array, mesh, value.spec)
        result, restore = split_result(function(*args, **kwargs))
        leaves, tree = jax.tree.flatten(result)
        writes, written = watch.changes()
        is_output = output_test(call)
        leaves = [jnp.asarray(leaf) if is_output(leaf) else leaf for leaf in leaves]
        written = [jnp.asarray(array) for array in written]
    recording.is_open = False
    result = jax.tree.unflatten(tree, list(map(recording.concrete, leaves)))
    binding.check_result(result)
    outputs = None if graph is None else graph.outputs
    names = binding.result_dim_names(result)
    specs = _result_specs(result, options, mesh, names, outputs)
    given = write_values(writes, list(map(jax.typeof, written)), values)
    return EagerResult(
        restore(
            jax.tree.unflatten(
                tree,
                [
                    _placed(leaf, mesh, spec)
                    for leaf, spec in zip(jax.tree.leaves(result), specs, strict=True)
                ],
            )
        ),
        writes,
        [
            _placed(recording.concrete(array), mesh, value.spec)
            for array, value in zip(written, given, strict=True)
        ],
    )


def _traced(function: Callable[..., Any], call: Call, options: Options) -> Graph:
    """The function as a program, from which a strategy infers roles."""
    with jax.disable_jit(False), jax.debug_nans(False):
        return trace(function, call, options).graph


def _mesh_of(call: Call, options: Options) -> Mesh | None:
    opened = open_mesh(declares_layouts=options.declares_layouts)
    return common_mesh(call.leaves, [("the step", options.mesh or opened)])


def _result_specs(
    result: Any,
    options: Options,
    mesh: Mesh | None,
    dim_names: Mapping[str, Sequence[str]],
    outputs: Sequence[Value] | None,
) -> list[PartitionSpec | None]:
    """The layout of each leaf of a result: declared, or as a strategy's outputs."""
    arrays, skeleton = partition(result, is_number)
    count = skeleton.structure.num_leaves
    if mesh is None:
        return [None] * count
    if outputs is None:
        avals = list(map(jax.typeof, arrays))
        outputs = output_values(options, skeleton, avals, mesh, dim_names)
    specs = iter(value.spec for value in outputs)
    return [None if i in skeleton.statics else next(specs) for i in range(count)]


def _placed(value: Any, mesh: Mesh | None, spec: PartitionSpec | None) -> Any:
    """An array in its declared layout; other values as they are."""
    if isinstance(value, DistTensor):
        value = value.materialize()
    if not is_number(value):
        return value
    array = jnp.asarray(value)
    if mesh is None or spec is None:
        return array
    return jax.device_put(array, NamedSharding(mesh.jax, spec))


def _gradients(
    recording: Recording, operands: Sequence[Any], params: dict[str, Any]
) -> list[Any]:
    """``ts.grad`` of a loss that was computed eagerly."""
    loss, *weights = operands
    if recording.reads_references(loss):
        raise OutsideTraceError(
            "a gradient through mutable arrays cannot be taken operation by operation",
            got="jax.disable_jit() around a call that takes it",
            fix="leave jax.disable_jit() out, or compute the loss without jax.new_ref",
        )
    reached = recording.reached(loss, weights)
    if not (all(reached) or params["allow_unused"]):
        names = zip(params["names"], reached, strict=True)
        missing = [name for name, is_reached in names if not is_reached]
        hint = params.get("hint", "")
        raise unconnected_error(missing, len(weights), hint=hint)
    return recording.gradients(loss, weights)


def _refuse_pipeline(*_: Any) -> NoReturn:
    raise OutsideTraceError(
        "a pipeline is one compiled loop, and has no operations to run one by one",
        got="jax.disable_jit() around a call with a graph.pipeline",
        fix="leave jax.disable_jit() out, or call the stages without the pipeline",
    )


register_eager_rule(gradient_p, _gradients)
register_eager_rule(pipeline_p, _refuse_pipeline)
