# SPDX-License-Identifier: Apache-2.0
"""A step on a mesh that it was not called on, run for the values inside it."""

import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tessera import _jax
from tessera.api.function import Function
from tessera.api.training_step import Step
from tessera.compiler.ir import Graph, Value
from tessera.compiler.lower.jit import compiler_options, lower
from tessera.compiler.stages import Compiled, Traced
from tessera.debug.intermediates import Site, collecting, sites
from tessera.errors import ParameterTreeError
from tessera.mesh import Mesh
from tessera.objects import objects_split
from tessera.shard import DistTensor, ShardSpec
from tessera.spec import axes_of_dims


@dataclass(frozen=True)
class MeshRun:
    """A step on one mesh, which can be run for any of the values inside it.

    Attributes:
      mesh: The mesh.
      traced: The step, traced for it.
      graph: Its graph after the passes, without what nobody reads.
      inputs: The arrays that the compiled program takes.
      sites: The values inside.
    """

    mesh: Mesh
    traced: Traced
    graph: Graph
    inputs: tuple[Any, ...]
    sites: tuple[Site, ...]

    @classmethod
    def on(cls, mesh: Mesh, step: Callable[..., Any], args: Sequence[Any]) -> "MeshRun":
        """The step traced for a mesh, its arguments and parameters moved there."""
        with mesh, objects_split(args, {}) as call:
            function = _made_for(mesh, step)
            moved = _moved(function, call.args, mesh)
            traced = function.trace(*moved)
            traced.require_devices()
            program = _jax.without_dead_code(traced.graph.program, keep_inputs=True)
            graph = replace(traced.graph, program=program)
            parts = [
                argument.dynamic_part(value)
                for argument, value in zip(traced.call.arguments, moved, strict=True)
            ]
            parameters = _parameters(
                step if isinstance(step, Step) else function, traced
            )
            inputs = [value.name for value in graph.inputs]
            outputs = [value.name for value in graph.outputs]
            found = sites(program, inputs, outputs, graph.platform)
            return cls(mesh, traced, graph, (*parts, parameters), tuple(found))

    def values(self, wanted: Sequence[Site]) -> list[np.ndarray[Any, Any]]:
        """Run the step for the values at some of its sites, in their order."""
        outputs = [
            Value(s.path, jax.ShapeDtypeStruct(s.full_shape, s.dtype)) for s in wanted
        ]
        program = collecting(self.graph.program, wanted)
        graph = replace(self.graph, program=program, outputs=tuple(outputs))
        origin = replace(
            self.traced.origin,
            donated=frozenset(),
            out_tree=jax.tree.structure([0] * len(wanted)),
            out_statics={},
        )
        with self.mesh:
            lowered = lower(origin, graph, self.traced.call)
            compiled = lowered.compile(compiler_options(graph) or None)
            captured = Compiled(self.traced, compiled).captured
            return list(map(np.asarray, compiled(*self.inputs, captured)))


def _made_for(mesh: Mesh, step: Callable[..., Any]) -> Function:
    """A step of its own for a mesh; what it compiles is not kept in the user's."""
    if not isinstance(step, Function):
        return step(mesh)
    options = replace(step.options, mesh=mesh)
    return type(step)(step.body, options, step.skip_passes)


def _parameters(owner: Function, traced: Traced) -> tuple[Any, ...]:
    """The arrays of the parameters: the owner's, or as their names make them."""
    held: Any = {}
    if isinstance(owner, Step):
        with suppress(ParameterTreeError):  # it was never traced
            held = owner.params
    arrays = []
    for name, declared in traced.origin.parameters.items():
        own = functools.reduce(operator.getitem, name.split("/"), held) if held else 0
        is_made = isinstance(own, jax.Array)
        arrays.append(_on_host(own) if is_made else jnp.asarray(declared))
    return tuple(arrays)


def _moved(function: Function, args: Sequence[Any], mesh: Mesh) -> tuple[Any, ...]:
    """Arguments for a mesh: laid out as they are, as far as it can be, or declared."""
    names = list(inspect.signature(function.body).parameters)
    declared = function.options.in_specs

    def move(name: str, leaf: Any) -> Any:
        if isinstance(leaf, DistTensor):
            leaf = jnp.asarray(leaf)
        if not isinstance(leaf, jax.Array):
            return leaf
        host, sharding = _on_host(leaf), leaf.sharding
        if name in declared or not isinstance(sharding, NamedSharding):
            return host
        spec = _on_axes_of(mesh, sharding.spec).named(leaf.shape, mesh, what=name)
        return jax.device_put(host, spec)

    return tuple(
        jax.tree.map(functools.partial(move, name), value, is_leaf=_is_tensor)
        for name, value in zip_longest(names[: len(args)], args, fillvalue="argument")
    )


def _on_axes_of(mesh: Mesh, spec: PartitionSpec) -> ShardSpec:
    """A layout with those of its axes that a mesh has."""
    known = [
        tuple(axis for axis in axes if axis in mesh.axes)
        for axes in axes_of_dims(spec, len(spec))
    ]
    return ShardSpec(tuple(range(len(known))), tuple(axes or None for axes in known))


def _on_host(array: jax.Array) -> Any:
    """The numbers of an array, on no device in particular."""
    if not jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return np.asarray(array)
    data = jnp.asarray(np.asarray(jax.random.key_data(array)))
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))


def _is_tensor(value: object) -> bool:
    return isinstance(value, DistTensor)
