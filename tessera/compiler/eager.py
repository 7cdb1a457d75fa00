# SPDX-License-Identifier: Apache-2.0
"""``jax.disable_jit()``: a function that runs operation by operation, and no program.

The body runs once, with arrays that know their numbers, so ``print``, a debugger and
Python's ``if`` work in it. Arguments and results are laid out as declared, what it
assigns into dicts is given back, and ``ts.grad`` differentiates what ran so far. What
passes over a whole program do cannot be had: pipelines and autocast are refused.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from tessera import scope
from tessera._jax_recording import Recording, let_run
from tessera.annotations import bind
from tessera.compiler.gradient_primitive import gradient_p, unconnected
from tessera.compiler.ir import Graph, Value
from tessera.compiler.pipelining.pipeline_primitive import pipeline_p
from tessera.compiler.trace.arguments import Call
from tessera.compiler.trace.declared_layouts import (
    Options,
    argument_values,
    is_number,
    output_values,
)
from tessera.compiler.trace.mesh_inference import common_mesh
from tessera.compiler.trace.torch_transpose import let_transpose_swap
from tessera.compiler.trace.tracer import trace
from tessera.compiler.trace.write_back import Watch, Write, write_values
from tessera.errors import OutsideTraceError, UnconnectedGradientError
from tessera.mesh import Mesh, manual_axes, opened_or_none
from tessera.objects import check_references
from tessera.shard import DistTensor

# The array of a parameter, from its name and declaration.
Provide: TypeAlias = Callable[[str, DistTensor], Any]


@dataclass(frozen=True)
class Outcome:
    """What a function gave that ran operation by operation.

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
    """The scope of a function whose operations run at once."""

    recording: Recording = field(default_factory=Recording)
    provide: Provide = lambda name, declared: declared.materialize()

    def value_of(self, name: str) -> Any:
        """The array of a declared parameter, which is made when it is first used."""
        if name not in self.values:
            with self.recording.left():
                made = self.provide(name, self.declared[name])
            self.values[name] = self.recording.array(made)
        return self.values[name]

    def not_reached(
        self, call: int, loss: Any, weights: Mapping[str, Any]
    ) -> Collection[str]:
        """The parameters that a loss does not depend on."""
        reached = self.recording.reached(loss, list(weights.values()))
        if weights and not any(reached):
            raise UnconnectedGradientError(
                "the loss depends on no trainable parameter of the step",
                got=f"none of {len(weights)}: {', '.join(map(repr, weights))}",
                fix="compute the loss from them",
            )
        return {
            name
            for name, is_reached in zip(weights, reached, strict=True)
            if not is_reached
        }


def run_eagerly(
    function: Callable[..., Any], call: Call, options: Options, provide: Provide
) -> Outcome:
    """Run a function on the arrays of a call, one operation after the other.

    Args:
      function: The user's function.
      call: Its arguments, taken apart.
      options: What is declared beside the code.
      provide: Gives the arrays of parameters.

    Raises:
      OutsideTraceError: [T302] it needs what a pass does with a whole program.
      UnconnectedGradientError: [T303] a loss does not depend on a weight.
      WriteBackError: [T320] an argument was changed that cannot be given back.
    """
    let_transpose_swap()
    scope.check_autocast_of_programs(scope.current_autocast())
    binding = bind(function, call.args, call.kwargs, name=options.name)
    graph = None if options.strategy is None else _traced(function, call, options)
    if graph is not None:
        mesh, values = graph.mesh, graph.inputs[: len(call.leaves)]
    else:
        mesh = _mesh_of(call, options)
        values = argument_values(call, options, mesh, binding.dim_names)
    recording = Recording()
    here = _EagerScope(
        mesh=mesh,
        plan=scope.current_plan(),
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
    watch = Watch([*args, *kwargs.values()], names, options.donate)
    with scope.opened(here), recording.entered():
        for array, value in zip(arrays, values, strict=True):
            if value.spec is not None and mesh is not None:
                scope.record_layout(array, mesh, value.spec)
        result = function(*args, **kwargs)
        leaves, tree = jax.tree.flatten(result)
        check_references(leaves, ())
        writes, written = watch.changes()
        leaves = [jnp.asarray(leaf) if is_number(leaf) else leaf for leaf in leaves]
        written = [jnp.asarray(array) for array in written]
    recording.is_open = False
    result = jax.tree.unflatten(tree, list(map(recording.known, leaves)))
    binding.check_result(result)
    outputs = None if graph is None else graph.outputs
    names = binding.result_dim_names(result)
    specs = _result_specs(result, options, mesh, names, outputs)
    given = write_values(writes, list(map(jax.typeof, written)), values)
    return Outcome(
        jax.tree.unflatten(
            tree,
            [
                _placed(leaf, mesh, spec)
                for leaf, spec in zip(jax.tree.leaves(result), specs, strict=True)
            ],
        ),
        writes,
        [
            _placed(recording.known(array), mesh, value.spec)
            for array, value in zip(written, given, strict=True)
        ],
    )


def _traced(function: Callable[..., Any], call: Call, options: Options) -> Graph:
    """The function as a program, which a strategy finds the roles of arguments by."""
    with jax.disable_jit(False), jax.debug_nans(False):
        return trace(function, call, options).graph


def _mesh_of(call: Call, options: Options) -> Mesh | None:
    opened = None if manual_axes() else opened_or_none()
    return common_mesh(call.leaves, [("the step", options.mesh or opened)])


def _result_specs(
    result: Any,
    options: Options,
    mesh: Mesh | None,
    dim_names: Mapping[str, Sequence[str]],
    outputs: Sequence[Value] | None,
) -> list[PartitionSpec | None]:
    """The layout of each leaf of a result: declared, or as a strategy's outputs."""
    leaves, tree = jax.tree.flatten(result)
    if mesh is None:
        return [None] * len(leaves)
    statics = {i: leaf for i, leaf in enumerate(leaves) if not is_number(leaf)}
    avals = [jax.typeof(leaf) for leaf in leaves if is_number(leaf)]
    if outputs is None:
        outputs = output_values(options, tree, statics, avals, mesh, dim_names)
    specs = iter(value.spec for value in outputs)
    return [None if i in statics else next(specs) for i in range(len(leaves))]


def _placed(value: Any, mesh: Mesh | None, spec: PartitionSpec | None) -> Any:
    """An array where it is declared to lie; what is no array is itself."""
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
    """What ``ts.grad`` gives where the loss was computed at once."""
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
        raise unconnected(missing, len(weights), hint=hint)
    return recording.gradients(loss, weights)


def _refuse_pipeline(*_: Any) -> NoReturn:
    raise OutsideTraceError(
        "a pipeline is one compiled loop, and has no operations to run one by one",
        got="jax.disable_jit() around a call with a graph.pipeline",
        fix="leave jax.disable_jit() out, or call the stages without the pipeline",
    )


let_run(gradient_p, _gradients)
let_run(pipeline_p, _refuse_pipeline)
