# SPDX-License-Identifier: Apache-2.0
"""``ts.compare_layouts``: the first operation of a step that depends on the mesh.

The step is traced for each mesh, and the values inside its program are made outputs of
it, as many at a time as fit a limit. What two meshes compute is then held side by side
in the order in which it is computed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from typing import Any, Final, TypeAlias

from tessera.errors import NoMeshError
from tessera.graph.device_parts import summed_axes
from tessera.graph.differences import (
    Difference,
    MeshComparison,
    Report,
    Tolerance,
    difference,
    shortened,
    wide,
)
from tessera.graph.intermediates import Site, sites_inside
from tessera.graph.mesh_runs import MeshRun
from tessera.mesh import Mesh

_MAX_BYTES: Final = 2**28
_SUMS: Final = ("psum", "psum_invariant", "psum2", "reduce_scatter")
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
    expected = MeshRun.on(reference, step, args)
    runs = [MeshRun.on(mesh, step, args) for mesh in others]
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


def _compared(reference: MeshRun, run: MeshRun, tolerance: Tolerance) -> MeshComparison:
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
    differences.sort(key=lambda found: found.when)
    if differences and reference.mesh.size == 1 and differences[0].site.inside:
        pair = next(pair for pair in pairs if pair[0] is differences[0].site)
        lines = _diagnosed(reference, run, pair, differences[0], tolerance)
        differences[0] = replace(differences[0], diagnosis=tuple(lines))
    alone = len(reference.sites) + len(run.sites) - 2 * len(aligned)
    return MeshComparison(
        mesh=run.mesh,
        differences=tuple(differences),
        compared=len(pairs),
        alone=alone,
        largest=largest,
        largest_at=largest_at,
    )


def _diagnosed(
    reference: MeshRun, run: MeshRun, region: Pair, found: Difference, tol: Tolerance
) -> Iterator[tuple[str, str]]:
    """What is wrong inside a manual region, as far as the numbers say.

    The reference is one device, whose values inside are whole. The first value that a
    mesh has not as blocks, copies or parts of a sum of them is what goes wrong, or what
    is given parts of a sum that should have been added up before.
    """
    runs = reference, run
    inside = [
        sites_inside(each.graph.program, site, each.graph.platform)
        for each, site in zip(runs, region, strict=True)
    ]
    parts: dict[str, str] = {}
    for chunk in _chunks(_aligned(*inside)):
        numbers = [
            each.values([pair[i] for pair in chunk]) for i, each in enumerate(runs)
        ]
        for (site, other), whole, held in zip(chunk, *numbers, strict=True):
            whole, held = wide(whole[found.iterations][0]), wide(held[found.iterations])
            sizes = {axis: run.mesh.shape[axis] for axis in other.axes}
            axes = summed_axes(whole, held, sizes, tol.allowed(site, whole))
            if axes is None:
                yield "wrong", f"first in {shortened(site.made)}"
                if parts:
                    *_, (made, over) = parts.items()
                    yield (
                        "before",
                        f"{shortened(made)} gives parts of a sum over {over}",
                    )
                return
            if axes:
                parts[site.made] = ", ".join(axes)
            elif site.operation in _SUMS:
                parts.clear()  # they were added up
    if over := parts.get(found.site.inside):
        yield "wrong", f"these are parts of a sum over {over}, which nothing adds up"
    else:
        yield "wrong", "each device has a block or a copy of it: see the out_specs"


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
