# SPDX-License-Identifier: Apache-2.0
"""Lists every collective of a compiled program: the ledger.

    ledger = collectives(step.compile(), mesh)
    print(ledger.as_text())

Each row is one collective operation of the program that XLA compiled, with the mesh
axes it runs over, its size, how often it runs, and the line of user code that caused
it. Collectives that no declared layout implies are listed too, as unplanned. Only what
a hand-written kernel sends by itself is invisible.
"""

import dataclasses
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from typing import Protocol, TypeVar

import jax
from jax.sharding import PartitionSpec

from tessera.analysis import ledger_text as text
from tessera.analysis.collective import KINDS, Collective, Total
from tessera.analysis.collective_reader import CollectiveReader
from tessera.analysis.collective_reasons import LAYOUT, BoundaryAxes, Reasons
from tessera.analysis.dataflow import Dataflow
from tessera.analysis.hlo_walk import Node
from tessera.analysis.sharding_constraints import DeclaredLayout, spec_axes
from tessera.analysis.slice_programs import program_of
from tessera.analysis.tables import aligned
from tessera.analysis.unplanned_advice import Advisor, NamedArray
from tessera.mesh import Mesh
from tessera.targets.target import Target

__all__ = ["KINDS", "HasText", "Ledger", "collectives"]

_K = TypeVar("_K", bound=Hashable)


class HasText(Protocol):
    """A compiled program: anything that can show the text of its XLA module."""

    def as_text(self) -> str | None:
        """The text of the compiled module."""
        ...


@dataclass(frozen=True, slots=True, repr=False)
class Ledger:
    """The collectives of one compiled program, in program order; prints as tables.

    Attributes:
      rows: One entry per collective operation.
      mesh_shape: Size of each axis of the mesh it was read against.
      target: The machine that the mesh is of, if its devices are not there.
    """

    rows: tuple[Collective, ...]
    mesh_shape: Mapping[str, int]
    target: Target | None = None

    @property
    def total_bytes(self) -> int:
        """Bytes of one device in one execution, all collectives together."""
        return sum(row.total_bytes for row in self.rows)

    @property
    def unplanned(self) -> tuple[Collective, ...]:
        """The rows that no declared layout implies."""
        return tuple(row for row in self.rows if not row.is_planned)

    def by_axis(self) -> dict[tuple[str, ...], Total]:
        """Sums per combination of mesh axes."""
        return _summed(self.rows, lambda row: row.axes)

    def totals(self) -> dict[tuple[tuple[str, ...], str], Total]:
        """Sums per combination of mesh axes and kind of collective."""
        return _summed(self.rows, lambda row: (row.axes, row.kind))

    def by_link(self) -> dict[str, float]:
        """Bytes that one device sends over each level of the target's links.

        In one execution, by the algorithms that send least. A level joins the devices
        of a host or slice (NVLink, ICI), or those between (InfiniBand, DCN).
        """
        sums: dict[str, float] = {}
        for row in self.rows:
            for link, nbytes in row.sent:
                sums[link] = sums.get(link, 0.0) + row.counted_calls * nbytes
        return sums

    def as_text(self) -> str:
        """The rows as a table, then the sums per axis and kind."""
        if not self.rows:
            return self.summary()
        rows = text.rows(self.rows, self.mesh_shape)
        cut = ("op", "line", "arrays")
        table = aligned(text.ROWS, rows, right=text.ROWS[3:5], cut=cut)
        return f"{table}\n\n{self.summary()}"

    __str__ = as_text
    __repr__ = as_text

    def summary(self) -> str:
        """The sums per axis and kind alone, as tables."""
        title = text.title(self.target)
        if not self.rows:
            return f"no collectives, {title}" if title else "no collectives"
        sums = text.sums(self.by_axis(), self.totals())
        table = aligned(text.SUMS, sums, right=text.SUMS[2:])
        notes = title, text.sent(self.by_link()), *text.notes(self.rows)
        return "\n".join(line for line in (table, *notes) if line)


def collectives(
    compiled: HasText | str,
    mesh: Mesh,
    declared: Collection[DeclaredLayout] = (),
    results: Iterable[PartitionSpec] | None = None,
    names: tuple[Sequence[str], Sequence[str]] = ((), ()),
) -> Ledger:
    """Every collective of a compiled program, against the mesh it was compiled for.

    Args:
      compiled: A compiled program, or the text of its XLA module. It is read as it is:
        XLA on CPU sends bf16 as f32, so a CPU program's bytes are not a GPU's.
      mesh: The mesh of the program, in the order of its devices. It may be abstract.
      declared: The layouts that the program declares inside, from
        ``declared_layouts``: without them, what they ask for is unplanned.
      results: The layouts that it declares for its results; None takes those that it
        was compiled with.
      names: Of its inputs, and of its results: without them, there is no advice on how
        to avoid what is unplanned.

    Returns:
      One row per collective. Groups of one device move nothing and have no row.

    Raises:
      MeshShapeError: [T101] the program is for another number of devices than the
        mesh has.

    Example:
      >>> text = '''HloModule step, num_partitions=4
      ... ENTRY main {
      ...   g = f32[64,16]{1,0} parameter(0)
      ...   ROOT r = f32[64,16]{1,0} all-reduce(g), replica_groups=[2,2]<=[2,2]T(1,0)
      ... }'''
      >>> row = collectives(text, Mesh(["dp", "tp"], devices=range(4))).rows[0]
      >>> row.kind, row.axes, row.nbytes, row.calls
      ('all-reduce', ('dp',), 4096, 1)
    """
    shown = compiled if isinstance(compiled, str) else compiled.as_text() or ""
    flow = Dataflow(program_of(shown, mesh))
    reader = CollectiveReader(flow, mesh)
    rows = list(reader.rows())
    if not rows:
        return Ledger((), mesh.shape, mesh.target)
    inputs, outputs = _ends(compiled, names)
    boundary = None
    if hasattr(compiled, "input_shardings"):
        if results is None:
            results = [array.spec for array in outputs]
        boundary = BoundaryAxes(
            [spec_axes(array.spec) for array in inputs], list(map(spec_axes, results))
        )
    reasons = Reasons(flow, mesh.shape, boundary, declared)
    advisor = Advisor(flow, reasons, mesh.shape, inputs, outputs)
    explained = tuple(_explained(reasons, advisor, *pair) for pair in rows)
    return Ledger(explained, mesh.shape, mesh.target)


def _ends(
    compiled: HasText | str, names: tuple[Sequence[str], Sequence[str]]
) -> Iterator[list[NamedArray]]:
    """What a program takes, and what it returns, with the layouts it was compiled for.

    What it does not read has None for a sharding, and is no input of the module.
    """
    for part, own in zip(("input_shardings", "output_shardings"), names, strict=True):
        tree = getattr(compiled, part, ())
        shardings = jax.tree.leaves(tree, is_leaf=lambda leaf: leaf is None)
        own = own if len(own) == len(shardings) else [""] * len(shardings)
        yield [
            NamedArray(name, getattr(sharding, "spec", PartitionSpec()))
            for name, sharding in zip(own, shardings, strict=True)
            if sharding is not None
        ]


def _explained(
    reasons: Reasons, advisor: Advisor, node: Node, row: Collective
) -> Collective:
    """A row with its reason, or what avoids it where it has none."""
    if reasons.copies_whole(node, row):
        row = dataclasses.replace(row, copies_whole=True)
        return dataclasses.replace(row, advice=advisor.advice(node, row))
    if row.kind == "all-reduce" and reasons.keeps_slice(node):
        row = dataclasses.replace(row, keeps_slice=True)
    reason = reasons.reason(node, row)
    declared = reasons.declaration(node, row) if reason == LAYOUT else None
    advice = None if reason else advisor.advice(node, row)
    source = declared or row.source
    return dataclasses.replace(row, reason=reason, source=source, advice=advice)


def _summed(
    rows: Iterable[Collective], key: Callable[[Collective], _K]
) -> dict[_K, Total]:
    groups: dict[_K, list[Collective]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return {
        name: Total(
            operations=len(group),
            calls=sum(row.counted_calls for row in group),
            nbytes=sum(row.total_bytes for row in group),
        )
        for name, group in groups.items()
    }
