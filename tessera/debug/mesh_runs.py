# SPDX-License-Identifier: Apache-2.0
"""Runs a step on a mesh of one's choice, for the intermediate values inside it."""

import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from tessera.annotations import argument_names, signature_of
from tessera.debug.intermediates import Site, intermediates
from tessera.errors import ParameterTreeError
from tessera.foundations.tree import named_leaves
from tessera.graph.compile_stages import Compiled, Traced
from tessera.graph.function import Function
from tessera.graph.ir import Value
from tessera.graph.lower.lower_to_jit import compile_lowered, lower
from tessera.graph.tracer.arguments import flatten_args
from tessera.graph.training_steps import Step
from tessera.jax_compat import jaxprs
from tessera.mesh import Mesh
from tessera.shard import DistTensor, is_tensor
from tessera.shard_spec import check_even, spec_over
from tessera.tracing.object_arguments import objects_split

Array: TypeAlias = np.ndarray[Any, Any]


@dataclass(frozen=True)
class MeshRun:
    """A step on one mesh, which can be run for any of the values inside it.

    Attributes:
      mesh: The mesh.
      traced: The step, traced for it.
      arrays: What the compiled program takes.
      sites: The values inside.
      program: The step's program after the passes, with these values as outputs.
    """

    mesh: Mesh
    traced: Traced
    arrays: tuple[Any, ...]
    sites: tuple[Site, ...]
    program: jaxprs.Program

    @classmethod
    def on(cls, mesh: Mesh, step: Callable[..., Any], args: Sequence[Any]) -> "MeshRun":
        """The step traced for a mesh, its arguments and parameters moved there."""
        with mesh, objects_split(args, {}) as call:
            function = _function_for(mesh, step)
            moved = _on_mesh(function, call.args, mesh)
            traced = function.trace(*moved)
            traced.require_devices()
            flat = flatten_args([""] * len(moved), moved, {}).arguments
            owner = step if isinstance(step, Step) else function
            parts = [argument.own_part() for argument in flat]
            arrays = (*parts, _parameters(owner, traced))
            graph = traced.graph
            inputs = [value.name for value in graph.inputs]
            outputs = [value.name for value in graph.outputs]
            program = jaxprs.without_dead_code(graph.program, keep_inputs=True)
            found = intermediates(program, inputs, outputs, graph.platform)
            return cls(mesh, traced, arrays, *found)

    def values(self, numbers: Sequence[int]) -> list[Array]:
        """Run the step for the values at some of its sites, in ascending order."""
        chosen = set(numbers)
        wanted = [number in chosen for number in range(len(self.sites))]
        program = jaxprs.without_dead_code(
            self.program, outputs=wanted, keep_inputs=True
        )
        outputs = tuple(
            Value(site.path, jax.ShapeDtypeStruct(site.full_shape, site.dtype))
            for site in itertools.compress(self.sites, wanted)
        )
        graph = replace(self.traced.graph, program=program, outputs=outputs)
        origin = replace(self.traced.origin, donated=frozenset())
        with self.mesh:
            lowered = lower(origin, graph, self.traced.call)
            compiled = compile_lowered(graph, lowered)
            captured = Compiled(self.traced, compiled).captured
            return list(map(np.asarray, compiled(*self.arrays, captured)))


def _function_for(mesh: Mesh, step: Callable[..., Any]) -> Function:
    """A copy of a step for a mesh; what it compiles is not cached in the user's."""
    if not isinstance(step, Function):
        return step(mesh)
    options = replace(step.options, mesh=mesh)
    return type(step)(step.body, options, step.skip_passes)


def _parameters(owner: Function, traced: Traced) -> tuple[Any, ...]:
    """The parameters: the owner's arrays, or arrays initialized by their names."""
    own: dict[str, Any] = {}
    if isinstance(owner, Step):
        with suppress(ParameterTreeError):  # it was never traced
            own = named_leaves(owner.params)
    arrays = []
    for name, declared in traced.origin.parameters.items():
        leaf = own.get(name)
        is_array = isinstance(leaf, jax.Array)
        arrays.append(_on_host(leaf) if is_array else jnp.asarray(declared))
    return tuple(arrays)


def _on_mesh(function: Function, args: Sequence[Any], mesh: Mesh) -> tuple[Any, ...]:
    """Arguments for a mesh, in their declared layouts or, where possible, their own."""
    names = argument_names(signature_of(function.body), len(args))
    options = function.options

    def move(name: str, leaf: Any) -> Any:
        if isinstance(leaf, DistTensor):
            leaf = jnp.asarray(leaf)
        if not isinstance(leaf, jax.Array):
            return leaf
        host, sharding = _on_host(leaf), leaf.sharding
        declared = options.in_specs.get(name, options.in_spec)
        if declared is not None or not isinstance(sharding, NamedSharding):
            return host
        spec = spec_over(sharding.spec, mesh.axes)
        check_even(f"{name} cannot be laid out as it is", leaf.shape, spec, mesh)
        return jax.device_put(host, NamedSharding(mesh.jax, spec))

    pairs = itertools.zip_longest(names[: len(args)], args, fillvalue="argument")
    return tuple(
        jax.tree.map(functools.partial(move, name), value, is_leaf=is_tensor)
        for name, value in pairs
    )


def _on_host(array: jax.Array) -> Any:
    """An array copied to the host, so that it is committed to no device."""
    if not jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return np.asarray(array)
    data = jnp.asarray(np.asarray(jax.random.key_data(array)))
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
