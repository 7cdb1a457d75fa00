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
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import jax
from jax.sharding import PartitionSpec

from tessera.analysis import hlo
from tessera.analysis import ledger_text as text
from tessera.analysis.collective import KINDS, Collective, Total
from tessera.analysis.collective_reader import CollectiveReader
from tessera.analysis.collective_reasons import LAYOUT, BoundaryAxes, Reasons
from tessera.analysis.dataflow import Dataflow
from tessera.analysis.hlo_walk import Node
from tessera.analysis.sharding_constraints import DeclaredLayout, spec_axes
from tessera.analysis.tables import aligned
from tessera.errors import MeshShapeError
from tessera.mesh import Mesh
from tessera.targets.target import Target

__all__ = ["KINDS", "HasText", "Ledger", "collectives"]

_K = TypeVar("_K", bound=Hashable)


class HasText(Protocol):
    """A compiled program: anything that can show the text of its XLA module."""

    def as_text(self) -> str | None:
        """The text of the compiled module."""
        ...


@dataclass(frozen=True, slots=True)
class Ledger:
    """The collectives of one compiled program, in program order.

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

    def as_text(self) -> str:
        """The rows as a table, then the sums per axis and kind."""
        if not self.rows:
            return self.summary()
        rows = text.rows(self.rows, self.mesh_shape)
        return f"{aligned(text.ROWS, rows, right=text.ROWS[3:6])}\n\n{self.summary()}"

    def summary(self) -> str:
        """The sums per axis and kind alone, as tables."""
        title = text.title(self.target)
        if not self.rows:
            return f"no collectives, {title}" if title else "no collectives"
        sums = text.sums(self.by_axis(), self.totals())
        table = aligned(text.SUMS, sums, right=text.SUMS[2:])
        notes = [*([title] if title else ()), *text.notes(self.rows)]
        return "\n".join([table, *notes])


def collectives(
    compiled: HasText | str,
    mesh: Mesh,
    declared: Collection[DeclaredLayout] = (),
    results: Iterable[PartitionSpec] | None = None,
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
    module = hlo.parse(
        compiled if isinstance(compiled, str) else compiled.as_text() or ""
    )
    flow = Dataflow(module)
    reader = CollectiveReader(flow, mesh)
    rows = list(reader.rows())
    if rows and module.num_devices not in (1, mesh.size):
        raise MeshShapeError(
            "the ledger's mesh is not the one that the program was compiled for",
            got=f"{mesh.topology} = {mesh.size} devices, "
            f"a program for {module.num_devices}",
            fix="pass the mesh that the program was lowered on",
        )
    if not rows:
        return Ledger((), mesh.shape, mesh.target)
    boundary = _boundary(compiled, results)
    reasons = Reasons(flow, mesh.shape, boundary, declared)
    explained = tuple(_with_reason(reasons, *pair) for pair in rows)
    return Ledger(explained, mesh.shape, mesh.target)


def _boundary(
    compiled: HasText | str, results: Iterable[PartitionSpec] | None
) -> BoundaryAxes | None:
    """The axes that inputs and results are split over; None where they are unknown."""
    if not hasattr(compiled, "input_shardings"):
        return None

    def specs(name: str) -> list[PartitionSpec]:
        # What the program does not read has None here, and is no input of the module.
        shardings = jax.tree.leaves(getattr(compiled, name, ()))
        return [getattr(sharding, "spec", PartitionSpec()) for sharding in shardings]

    outputs = specs("output_shardings") if results is None else results
    inputs = specs("input_shardings")
    return BoundaryAxes(list(map(spec_axes, inputs)), list(map(spec_axes, outputs)))


def _with_reason(reasons: Reasons, node: Node, row: Collective) -> Collective:
    if reasons.copies_whole(node, row):
        return dataclasses.replace(row, copies_whole=True)
    if row.kind == "all-reduce" and reasons.keeps_slice(node):
        row = dataclasses.replace(row, keeps_slice=True)
    reason = reasons.reason(node, row)
    declared = reasons.declaration(node, row) if reason == LAYOUT else None
    return dataclasses.replace(row, reason=reason, source=declared or row.source)


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
