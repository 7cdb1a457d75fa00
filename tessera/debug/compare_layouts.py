# SPDX-License-Identifier: Apache-2.0
"""``ts.compare_layouts``: finds the first operation of a step that depends on the mesh.

The step is traced for each mesh, and its intermediate values become outputs, as many at
a time as fit a limit. The values on two meshes are compared in the order in which they
are computed.
"""

import itertools
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from typing import Any, Final, TypeAlias

from tessera.debug.differences import Difference, Report, difference
from tessera.debug.intermediates import Site
from tessera.debug.mesh_runs import MeshRun
from tessera.jax_compat.tracebacks import at_boundary
from tessera.mesh import AnyMesh, Mesh, as_mesh

__all__ = ["compare_layouts"]

MAX_BYTES: Final = 2**28

# The numbers of a value on the reference, and of the same on another mesh.
Pair: TypeAlias = tuple[int, int]


@at_boundary
def compare_layouts(
    step: Callable[..., Any],
    batch: Any,
    mesh: AnyMesh,
    reference: AnyMesh | None = None,
    *,
    rtol: float | None = None,
    atol: float | None = None,
) -> Report:
    """Run a step on two meshes, and name the first operation that differs.

    Every value inside the step is compared in the order of computation, backward pass
    and loops included. They become outputs of the compiled programs, as many at a time
    as 256 MiB hold, so XLA fuses the operations differently than when the step runs.
    The user's arrays stay as they are, donated ones too.

    Args:
      step: A ``ts.function`` or a training step. One that is made for a mesh, such as
        one that closes over a ``dist.tensor``, is given as a plain function that takes
        a mesh and returns the step.
      batch: The step's argument; a tuple has several. Arrays for which the step
        declares no layout keep theirs, as far as a mesh has its axes.
      mesh: The mesh in question.
      reference: The mesh that it is compared with; None is one device.
      rtol: Relative error that is no difference. By default the square root of the
        machine epsilon of the coarsest dtype that was computed in so far: 3.5e-4 for
        f32, 0.088 for bf16. Integers have to be equal.
      atol: Absolute error that is no difference, by default ``rtol`` of the largest
        number of the array.

    Returns:
      A report that prints: the first operation that differs, the user's line, the
      largest error and where it is; or that there is no difference.

    Raises:
      AbstractMeshError: [T105] a mesh has devices that this machine lacks.
      NoMeshError: [T106] what is given is no mesh.

    Example:
      >>> import jax.numpy as jnp
      >>> from tessera.graph.jit import function
      >>> @function
      ... def step(x):
      ...     return jnp.sum(jnp.sin(x))
      >>> compare_layouts(step, jnp.ones((8, 2)), Mesh(["dp"], devices=range(4))).agrees
      True
    """
    mesh, reference = Mesh.of(mesh), as_mesh(reference)
    if reference is None:
        sizes = (1,) * len(mesh.axes)
        reference = Mesh(mesh.axes, devices=mesh.device_ids[:1], shape=sizes)
    args = batch if isinstance(batch, tuple) else (batch,)
    expected = MeshRun.on(reference, step, args)
    return _compare(expected, MeshRun.on(mesh, step, args), rtol, atol)


def _compare(
    reference: MeshRun, run: MeshRun, rtol: float | None, atol: float | None
) -> Report:
    """Compare a mesh with the reference, up to the first difference."""
    sites, others = reference.sites, run.sites
    paired = _paired(sites, others)
    pairs = [(i, j) for i, j in paired if _is_comparable(sites[i], others[j])]
    first: Difference | None = None
    for chunk in _chunks(sites, pairs):
        # A loop's first difference may be in a later operation of an earlier iteration.
        if first is not None and sites[chunk[0][0]].when()[0] > first.when[0]:
            break
        expected = reference.values([i for i, _ in chunk])
        values = run.values([j for _, j in chunk])
        for (i, _), one, two in zip(chunk, expected, values, strict=True):
            found = difference(sites[i], one, two, rtol, atol)
            if found and (first is None or found.when < first.when):
                first = found
    return Report(
        name=reference.traced.graph.name,
        reference=reference.mesh,
        mesh=run.mesh,
        first=first,
        compared=len(pairs),
        alone=len(sites) + len(others) - 2 * len(paired),
    )


def _paired(sites: Sequence[Site], others: Sequence[Site]) -> list[Pair]:
    """The values that two programs share, matched by operation, line and name scope."""
    keys, other_keys = (
        [(site.operation, site.source, site.path, site.result) for site in each]
        for each in (sites, others)
    )
    if keys == other_keys:
        return [(number, number) for number in range(len(keys))]
    matcher = SequenceMatcher(None, keys, other_keys, autojunk=False)
    blocks = matcher.get_matching_blocks()
    return [(each.a + i, each.b + i) for each in blocks for i in range(each.size)]


def _is_comparable(site: Site, other: Site) -> bool:
    """Whether both values are global: what SPMD regions save may be blocks."""
    return site.full_shape == other.full_shape or site.operation != "shard_map"


def _chunks(sites: Sequence[Site], pairs: Sequence[Pair]) -> list[list[Pair]]:
    """Pairs in order, in chunks of about ``MAX_BYTES``."""
    before = itertools.accumulate((sites[i].nbytes for i, _ in pairs), initial=0)
    chunks = [nbytes // MAX_BYTES for nbytes in before]
    grouped = itertools.groupby(zip(chunks, pairs, strict=False), lambda both: both[0])
    return [[pair for _, pair in chunk] for _, chunk in grouped]
