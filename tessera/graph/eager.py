# SPDX-License-Identifier: Apache-2.0
"""Eager execution under ``jax.disable_jit()``: runs a function operation by operation.

The body runs once, on concrete arrays, so ``print``, a debugger and Python's ``if``
work in it. Arguments and results get their declared layouts, and mutations are written
back. What needs the whole program is refused: ``ts.grad`` of a value, strategies,
pipelines and autocast.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from tessera.errors import OutsideTraceError
from tessera.foundations.tree import partition
from tessera.graph.tracer.arguments import Call
from tessera.graph.tracer.declared_layouts import (
    Options,
    argument_values,
    is_number,
    output_test,
    output_values,
)
from tessera.graph.tracer.mesh_inference import common_mesh, mesh_of
from tessera.graph.tracer.torch_transpose import enable_torch_transpose
from tessera.graph.tracer.write_back import MutationTracker, Write, write_values
from tessera.mesh import Mesh
from tessera.shard import DistTensor
from tessera.tracing import casts, scope
from tessera.tracing.object_arguments import split_result

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

    provide: Provide = lambda name, declared: declared.materialize()

    def value_of(self, name: str) -> Any:
        """The array of a declared parameter, which is made when it is first used."""
        if name not in self.values:
            self.values[name] = self.provide(name, self.declared[name])
        return self.values[name]


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
      WriteBackError: [T320] an argument was changed that cannot be given back.
    """
    enable_torch_transpose()
    casts.check_autocast_of_programs(casts.current_autocast())
    if options.strategy is not None:
        raise OutsideTraceError(
            "a strategy infers from the program what each argument is",
            got="jax.disable_jit() around a call under ts.distribute",
            fix="leave jax.disable_jit() out, or ts.distribute",
        )
    binding = call.bound_to(function, options.name)
    mesh = _mesh_of(call, options)
    call = call.on_mesh(mesh)
    values = argument_values(call, options, mesh, binding.dim_names)
    plan = scope.plan_of(options.is_deterministic)
    here = _EagerScope(mesh=mesh, plan=plan, is_eager=True, provide=provide)
    given = zip(call.leaves, values, strict=True)
    arrays = [_placed(leaf.value, mesh, value.spec) for leaf, value in given]
    args, kwargs = call.rebuilt(arrays)
    names = [argument.name for argument in call.arguments]
    watch = MutationTracker([*args, *kwargs.values()], names, options.donate)
    with scope.opened(here):
        for array, value in zip(arrays, values, strict=True):
            if value.spec is not None and mesh is not None:
                scope.record_layout(array, mesh, value.spec)
        result, restore = split_result(function(*args, **kwargs))
        writes, written = watch.changes()
    is_output = output_test(call)
    leaves, tree = jax.tree.flatten(result)
    leaves = [jnp.asarray(leaf) if is_output(leaf) else leaf for leaf in leaves]
    result = jax.tree.unflatten(tree, leaves)
    binding.check_result(result)
    specs = _result_specs(result, options, mesh, binding.result_dim_names(result))
    pairs = zip(leaves, specs, strict=True)
    leaves = [_placed(leaf, mesh, spec) for leaf, spec in pairs]
    targets = write_values(writes, list(map(jax.typeof, written)), values)
    return EagerResult(
        restore(jax.tree.unflatten(tree, leaves)),
        writes,
        [
            _placed(array, mesh, target.spec)
            for array, target in zip(written, targets, strict=True)
        ],
    )


def _mesh_of(call: Call, options: Options) -> Mesh | None:
    return common_mesh(call.leaves, [("the step", mesh_of(options))])


def _result_specs(
    result: Any,
    options: Options,
    mesh: Mesh | None,
    dim_names: Mapping[str, Sequence[str]],
) -> list[PartitionSpec | None]:
    """The declared layout of each leaf of a result."""
    arrays, skeleton = partition(result, is_number)
    count = skeleton.structure.num_leaves
    if mesh is None:
        return [None] * count
    avals = list(map(jax.typeof, arrays))
    outputs = output_values(options, skeleton, avals, mesh, dim_names)
    specs = iter(value.spec for value in outputs)
    return [None if i in skeleton.statics else next(specs) for i in range(count)]


def _placed(value: Any, mesh: Mesh | None, spec: PartitionSpec | None) -> Any:
    """An array in its declared layout; other values as they are."""
    if isinstance(value, DistTensor):
        value = value.materialize()
    if isinstance(value, jax.Ref) or not is_number(value):
        return value
    array = jnp.asarray(value)
    if mesh is None or spec is None:
        return array
    return jax.device_put(array, NamedSharding(mesh.jax, spec))
