# SPDX-License-Identifier: Apache-2.0
"""``ts.compare_layouts``: the first operation of a step that depends on the mesh.

The step is traced for each mesh, and the values inside its program are made outputs of
it, as many at a time as fit a limit. What two meshes compute is then held side by side
in the order in which it is computed.
"""

import functools
import inspect
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
from jax.sharding import NamedSharding, PartitionSpec

from tessera import _jax
from tessera.errors import NoMeshError, ParameterTreeError
from tessera.graph.differences import (
    Difference,
    MeshComparison,
    Report,
    Tolerance,
    difference,
)
from tessera.graph.function import Function
from tessera.graph.intermediates import Site, collecting, sites
from tessera.graph.ir import Graph, Value
from tessera.graph.lowering.jit import compiler_options, lower
from tessera.graph.stages import Compiled, Traced
from tessera.graph.training_step import Step
from tessera.mesh import Mesh
from tessera.shard import DistTensor, ShardSpec
from tessera.spec import axes_of_dims

_MAX_BYTES: Final = 2**28
Pair: TypeAlias = tuple[Site, Site]


def compare_layouts(
    step: Callable[..., Any],
    batch: Any,
    meshes: Mesh | Sequence[Mesh | None],
    *,
    rtol: float | None = None,
    atol: float | None = None,
) -> Report:
    """Run a step on several meshes, and name the first operation that differs.

    Every value inside the step is compared in the order of computation, backward pass
    and loops included. They become outputs of the compiled programs, as many at a time
    as 256 MiB hold, so the operations are fused otherwise than when the step runs; the
    user's arrays are left as they are, donated ones too.

    Args:
      step: A ``ts.function`` or a training step. One that is made for a mesh, such as
        one that closes over a ``dist.tensor``, is given as a plain function that takes
        a mesh and returns the step.
      batch: The step's argument; a tuple holds several. Arrays that the step declares
        no layout for keep theirs, as far as a mesh has its axes.
      meshes: The first is what the others are compared with. None stands for one
        device, and a single mesh is compared with that.
      rtol: Relative error that is no difference. By default the square root of the
        machine epsilon of the coarsest dtype that was computed in so far: 3.5e-4 for
        f32, 0.088 for bf16. Integers have to be equal.
      atol: Absolute error that is none, by default ``rtol`` of the largest number of
        the array.

    Returns:
      A report that prints: for each mesh the first operation that differs, the user's
      line, the largest error and where it is; or that there is no difference.

    Raises:
      AbstractMeshError: [T105] a mesh has devices that this machine lacks.
      NoMeshError: [T106] there is no mesh to compare on.

    Example:
      >>> import jax.numpy as jnp
      >>> from tessera.graph.function import function
      >>> @function
      ... def step(x):
      ...     return jnp.sum(jnp.sin(x))
      >>> compare_layouts(step, jnp.ones((8, 2)), Mesh(["dp"], devices=range(4))).agrees
      True
    """
    reference, *others = _meshes(meshes)
    args = batch if isinstance(batch, tuple) else (batch,)
    expected = _Run.on(reference, step, args)
    runs = [_Run.on(mesh, step, args) for mesh in others]
    tolerance = Tolerance(rtol, atol)
    found = tuple(_compared(expected, run, tolerance) for run in runs)
    return Report(expected.traced.graph.name, reference, found)


def _meshes(meshes: Mesh | Sequence[Mesh | None]) -> list[Mesh]:
    """The meshes, those of one device with every axis that the others have."""
    given = [None, meshes] if isinstance(meshes, Mesh) else list(meshes)
    known = [mesh for mesh in given if mesh is not None]
    if not known or len(given) < 2:
        raise NoMeshError(
            "there are no meshes to compare",
            got=f"{len(given)}, of which {len(given) - len(known)} None",
            fix="give one mesh, to compare it with one device, or several",
        )
    axes = tuple(dict.fromkeys(axis for mesh in known for axis in mesh.axes))
    ids = known[0].device_ids[:1]
    one = Mesh(axes, devices=ids, shape=(1,) * len(axes))
    return [one if mesh is None else mesh for mesh in given]


@dataclass(frozen=True)
class _Run:
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
    def on(cls, mesh: Mesh, step: Callable[..., Any], args: Sequence[Any]) -> "_Run":
        """The step traced for a mesh, its arguments and parameters moved there."""
        with mesh:
            function = _made_for(mesh, step)
            moved = _moved(function, args, mesh)
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
        arrays.append(_on_host(own) if is_made else declared.materialize())
    return tuple(arrays)


def _moved(function: Function, args: Sequence[Any], mesh: Mesh) -> tuple[Any, ...]:
    """Arguments for a mesh: laid out as they are, as far as it can be, or declared."""
    names = list(inspect.signature(function.body).parameters)
    declared = function.options.in_specs

    def move(name: str, leaf: Any) -> Any:
        if isinstance(leaf, DistTensor):
            leaf = leaf.materialize()
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


def _compared(reference: _Run, run: _Run, tolerance: Tolerance) -> MeshComparison:
    """Compare one mesh with the reference, up to its first difference."""
    aligned = _aligned(reference.sites, run.sites)
    pairs = [pair for pair in aligned if _means_the_same(*pair)]
    differences: list[Difference] = []
    largest, largest_at = 0.0, None
    for chunk in _chunks(pairs):
        # A loop's first difference may be in a later operation of an earlier iteration.
        place = chunk[0][0].place[0]
        if differences and place > differences[-1].site.place[0]:
            break
        expected = reference.values([site for site, _ in chunk])
        values = run.values([site for _, site in chunk])
        for (site, other), numbers, found in zip(chunk, expected, values, strict=True):
            differs, share = difference(site, other, numbers, found, tolerance)
            if differs is not None:
                differences.append(differs)
            elif share > largest:
                largest, largest_at = share, site
    alone = len(reference.sites) + len(run.sites) - 2 * len(aligned)
    return MeshComparison(
        mesh=run.mesh,
        differences=tuple(sorted(differences, key=lambda found: found.when)),
        compared=len(pairs),
        alone=alone,
        largest=largest,
        largest_at=largest_at,
    )


def _aligned(sites: Sequence[Site], others: Sequence[Site]) -> list[Pair]:
    """The operations that both programs have, in order, by what they are and where."""
    keys, other_keys = list(map(_key, sites)), list(map(_key, others))
    if keys == other_keys:
        return list(zip(sites, others, strict=True))
    matcher = SequenceMatcher(None, keys, other_keys, autojunk=False)
    return [
        (sites[block.a + i], others[block.b + i])
        for block in matcher.get_matching_blocks()
        for i in range(block.size)
    ]


def _means_the_same(site: Site, other: Site) -> bool:
    """Whether both are global values; what regions keep for each other are blocks."""
    return site.full_shape == other.full_shape or not site.is_kept


def _key(site: Site) -> tuple[Any, ...]:
    return (site.operation, site.source, site.path, site.result)


def _chunks(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    """Pairs in order, as many at a time as the limit holds of their values."""
    chunk, held = list[Pair](), 0
    for pair in pairs:
        size = max(site.nbytes for site in pair)
        if chunk and held + size > _MAX_BYTES:
            yield chunk
            chunk, held = list[Pair](), 0
        chunk.append(pair)
        held += size
    if chunk:
        yield chunk
