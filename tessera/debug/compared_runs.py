# SPDX-License-Identifier: Apache-2.0
"""Two runs of one step on two meshes, held side by side up to the first difference."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from typing import Any, Final, TypeAlias

from tessera.debug.device_values import summed_axes
from tessera.debug.differences import (
    Difference,
    MeshComparison,
    Tolerance,
    difference,
    shortened,
    wide,
)
from tessera.debug.intermediates import Site, sites_inside
from tessera.debug.mesh_runs import MeshRun
from tessera.primitive_properties import DEVICE_SUMS

_MAX_BYTES: Final = 2**28
Pair: TypeAlias = tuple[Site, Site]


def compared(reference: MeshRun, run: MeshRun, tolerance: Tolerance) -> MeshComparison:
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
            elif site.operation in DEVICE_SUMS:
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
