# SPDX-License-Identifier: Apache-2.0
"""Runs a step on a mesh of one's choice, for the intermediate values inside it."""

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import Any, Final, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from tessera import _jax
from tessera.annotations import argument_names, signature_of
from tessera.api.function import Function
from tessera.api.training_step import Step
from tessera.compiler.compile_stages import Compiled, Traced
from tessera.compiler.ir import Graph, Value
from tessera.compiler.lower.jit import compile_lowered, lower
from tessera.compiler.trace.arguments import flatten_args
from tessera.debug.intermediates import Site, collecting, sites
from tessera.errors import ParameterTreeError
from tessera.mesh import Mesh
from tessera.object_arguments import objects_split
from tessera.shard import DistTensor, ShardSpec
from tessera.shard_spec import axes_of_dims

MAX_BYTES: Final = 2**28

# A site on the reference, and the same on another mesh.
Pair: TypeAlias = tuple[Site, Site]
Array: TypeAlias = np.ndarray[Any, Any]


@dataclass(frozen=True)
class MeshRun:
    """A step on one mesh, which can be run for any of the values inside it.

    Attributes:
      mesh: The mesh.
      traced: The step, traced for it.
      graph: Its graph after the passes, without dead code.
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
            function = _function_for(mesh, step)
            moved = _on_mesh(function, call.args, mesh)
            traced = function.trace(*moved)
            traced.require_devices()
            program = _jax.without_dead_code(traced.graph.program, keep_inputs=True)
            graph = replace(traced.graph, program=program)
            parts = [
                argument.own_part()
                for argument in flatten_args([""] * len(moved), moved, {}).arguments
            ]
            owner = step if isinstance(step, Step) else function
            inputs, outputs = (
                [value.name for value in values]
                for values in (graph.inputs, graph.outputs)
            )
            every = sites(program, inputs, outputs, graph.platform)
            arrays = (*parts, _parameters(owner, traced))
            return cls(mesh, traced, graph, arrays, tuple(every))

    def values(self, selected: Sequence[Site]) -> list[Array]:
        """Run the step for the values at some of its sites, in their order."""
        outputs = [
            Value(s.path, jax.ShapeDtypeStruct(s.full_shape, s.dtype)) for s in selected
        ]
        program = collecting(self.graph.program, selected)
        graph = replace(self.graph, program=program, outputs=tuple(outputs))
        origin = replace(
            self.traced.origin,
            donated=frozenset(),
        )
        with self.mesh:
            lowered = lower(origin, graph, self.traced.call)
            compiled = compile_lowered(graph, lowered)
            captured = Compiled(self.traced, compiled).captured
            return list(map(np.asarray, compiled(*self.inputs, captured)))


def aligned(sites: Sequence[Site], others: Sequence[Site]) -> list[Pair]:
    """The values that two programs share, matched by operation, line and name scope."""
    keys, other_keys = list(map(_key, sites)), list(map(_key, others))
    if keys == other_keys:
        return list(zip(sites, others, strict=True))
    matcher = SequenceMatcher(None, keys, other_keys, autojunk=False)
    return [
        (sites[block.a + i], others[block.b + i])
        for block in matcher.get_matching_blocks()
        for i in range(block.size)
    ]


def _key(site: Site) -> tuple[Any, ...]:
    return (site.operation, site.source, site.path, site.result)


def chunks(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    """Pairs in order, in chunks whose values fit ``MAX_BYTES``."""
    chunk, total = list[Pair](), 0
    for pair in pairs:
        size = max(site.nbytes for site in pair)
        if chunk and total + size > MAX_BYTES:
            yield chunk
            chunk, total = list[Pair](), 0
        chunk.append(pair)
        total += size
    if chunk:
        yield chunk


def paired_values(
    reference: MeshRun, run: MeshRun, pairs: Sequence[Pair]
) -> Iterator[tuple[Site, Site, Array, Array]]:
    """Run a step on two meshes for the values at pairs of sites."""
    expected = reference.values([site for site, _ in pairs])
    values = run.values([site for _, site in pairs])
    for (site, other), *arrays in zip(pairs, expected, values, strict=True):
        first, second = arrays
        yield site, other, first, second


def _function_for(mesh: Mesh, step: Callable[..., Any]) -> Function:
    """A copy of a step for a mesh; what it compiles is not cached in the user's."""
    if not isinstance(step, Function):
        return step(mesh)
    options = replace(step.options, mesh=mesh)
    return type(step)(step.body, options, step.skip_passes)


def _parameters(owner: Function, traced: Traced) -> tuple[Any, ...]:
    """The parameters: the owner's arrays, or arrays initialized by their names."""
    own: Any = {}
    if isinstance(owner, Step):
        with suppress(ParameterTreeError):  # it was never traced
            own = owner.params
    arrays = []
    for name, declared in traced.origin.parameters.items():
        leaf = functools.reduce(operator.getitem, name.split("/"), own) if own else None
        is_array = isinstance(leaf, jax.Array)
        arrays.append(_on_host(leaf) if is_array else jnp.asarray(declared))
    return tuple(arrays)


def _on_mesh(function: Function, args: Sequence[Any], mesh: Mesh) -> tuple[Any, ...]:
    """Arguments for a mesh, in their declared layouts or, where possible, their own."""
    names = argument_names(signature_of(function.body), len(args))
    declared = function.options.in_specs

    def move(name: str, leaf: Any) -> Any:
        if isinstance(leaf, DistTensor):
            leaf = jnp.asarray(leaf)
        if not isinstance(leaf, jax.Array):
            return leaf
        host, sharding = _on_host(leaf), leaf.sharding
        if name in declared or not isinstance(sharding, NamedSharding):
            return host
        axes_by_dim = [
            tuple(axis for axis in axes if axis in mesh.axes) or None
            for axes in axes_of_dims(sharding.spec, len(sharding.spec))
        ]
        spec = ShardSpec(tuple(range(len(axes_by_dim))), tuple(axes_by_dim))
        return jax.device_put(host, spec.named(leaf.shape, mesh, what=name))

    return tuple(
        jax.tree.map(
            functools.partial(move, name),
            value,
            is_leaf=lambda leaf: isinstance(leaf, DistTensor),
        )
        for name, value in zip_longest(names[: len(args)], args, fillvalue="argument")
    )


def _on_host(array: jax.Array) -> Any:
    """An array copied to the host, so that it is committed to no device."""
    if not jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return np.asarray(array)
    data = jnp.asarray(np.asarray(jax.random.key_data(array)))
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
