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
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

import jax
from jax.sharding import PartitionSpec

from tessera.analysis import budget, hlo, replica_groups
from tessera.analysis.collective import KINDS, Collective, Total
from tessera.analysis.collective_operands import arrays_of, groups_of, kind_of
from tessera.analysis.dataflow import Dataflow
from tessera.analysis.hlo_walk import Node, cause
from tessera.analysis.memory import format_bytes
from tessera.analysis.planned_collectives import LAYOUT, BoundaryAxes, Reasons
from tessera.analysis.sharding_constraints import DeclaredLayout, spec_axes
from tessera.analysis.source_lines import short, user_line
from tessera.analysis.tables import aligned, html_lines, html_section, html_table
from tessera.errors import MeshShapeError
from tessera.mesh import Mesh

__all__ = ["KINDS", "HasText", "Ledger", "collectives"]

_COLUMNS: Final = (
    *("collective", "axes", "arrays", "bytes", "calls", "total"),
    *("reason", "line", "op"),
)
_SUMS: Final = ("axes", "collective", "operations", "calls", "bytes per device")

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
    """

    rows: tuple[Collective, ...]
    mesh_shape: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        """Bytes of one device in one execution, all collectives together."""
        return sum(row.total_bytes for row in self.rows)

    @property
    def unplanned(self) -> tuple[Collective, ...]:
        """The rows that no declared layout implies."""
        return tuple(row for row in self.rows if not row.is_planned)

    def assert_budget(
        self,
        budgets: Mapping[str | tuple[str, ...], int | str] | None = None,
        /,
        *,
        total: int | str | None = None,
        unplanned: int | str | None = None,
        calls: Mapping[str, int] | None = None,
        **axes: int | str,
    ) -> None:
        """Raise where the program sends more than a budget allows; for use in tests.

        Sizes are bytes of one device in one execution: an integer, or text such as
        ``"40MB"`` (10^6) or ``"1.5GiB"`` (2^30).

        Args:
          budgets: By combination of axes: ``{("dp", "tp"): "1MB"}`` is for collectives
            over exactly these two together.
          total: For all collectives together.
          unplanned: For those that no declared layout implies; 0 forbids them.
          calls: The most calls, by axis, or for ``"total"`` and ``"unplanned"``.
          **axes: By axis: for every collective over it, alone or with others.

        Raises:
          BudgetError: [T209] a budget is exceeded; the message lists the lines that
            send most, and a constraint that avoids unplanned collectives.
          BudgetFormError: [T210] a budget is not a size, or an axis does not exist.

        Example:
          >>> Ledger((), {"dp": 8}).assert_budget(dp="40MB", unplanned=0)
        """
        sizes = {**(budgets or {}), **axes, "total": total, "unplanned": unplanned}
        budget.check(self.rows, self.mesh_shape, sizes, calls or {})

    def by_axis(self) -> dict[tuple[str, ...], Total]:
        """Sums per combination of mesh axes."""
        return _summed(self.rows, lambda row: row.axes)

    def totals(self) -> dict[tuple[tuple[str, ...], str], Total]:
        """Sums per combination of mesh axes and kind of collective."""
        return _summed(self.rows, lambda row: (row.axes, row.kind))

    def as_text(self) -> str:
        """The rows as a table, then the sums per axis and kind."""
        if not self.rows:
            return "no collectives"
        rows = aligned(_COLUMNS, self._cells(), right=_COLUMNS[3:6])
        return f"{rows}\n\n{self.summary()}"

    def summary(self) -> str:
        """The sums per axis and kind alone, as a table."""
        if not self.rows:
            return "no collectives"
        sums = aligned(_SUMS, self._sums(), right=_SUMS[2:])
        return "\n".join([sums, *self._notes()])

    def _repr_html_(self) -> str:
        if not self.rows:
            return html_lines(["no collectives"])
        sums = html_table(_SUMS, self._sums()) + html_lines(self._notes())
        return sums + html_section(
            f"{len(self.rows)} collectives", html_table(_COLUMNS, self._cells())
        )

    def _cells(self) -> list[list[str]]:
        return [_cells(row, self.mesh_shape) for row in self.rows]

    def _sums(self) -> list[list[str]]:
        """Per combination of axes its kinds, and their sum where there are several."""
        lines = []
        for axes, sum_of_axes in self.by_axis().items():
            kinds = {k: total for (a, k), total in self.totals().items() if a == axes}
            if len(kinds) > 1:
                kinds["together"] = sum_of_axes
            for kind, total in kinds.items():
                counts = [str(total.operations), str(total.calls)]
                lines.append(
                    ["×".join(axes), kind, *counts, format_bytes(total.nbytes)]
                )
        return lines

    def _notes(self) -> list[str]:
        rows, count = self.rows, len(self.unplanned)
        notes = {
            f"UNPLANNED: {count} that no declared layout implies": count > 0,
            "whole: copied whole to every device, which slices it again": any(
                row.copies_whole for row in rows
            ),
            "≥: in a loop of unknown length, which counts once": any(
                row.calls is None for row in rows
            ),
            "≤: in a branch, which counts as taken": any(
                row.conditional for row in rows
            ),
        }
        return [note for note, applies in notes.items() if applies]

    def as_json(self) -> dict[str, Any]:
        """Rows and sums as plain data for ``json.dumps``; bytes are integers."""
        return {
            "mesh": dict(self.mesh_shape),
            "rows": [
                {
                    **dataclasses.asdict(row),
                    "axes": list(row.axes),
                    "arrays": [str(shape) for shape in row.arrays],
                    "nbytes": row.nbytes,
                    "total_bytes": row.total_bytes,
                    "is_planned": row.is_planned,
                }
                for row in self.rows
            ],
            "totals": [
                {"axes": list(axes), "kind": kind, **dataclasses.asdict(total)}
                for (axes, kind), total in self.totals().items()
            ],
        }


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
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    module = hlo.parse(text or "")
    flow = Dataflow(module)
    rows = [(node, row) for node in flow.nodes if (row := _row(flow, node, mesh))]
    if rows and module.num_devices not in (1, mesh.size):
        raise MeshShapeError(
            "the ledger's mesh is not the one that the program was compiled for",
            got=f"{mesh.topology} = {mesh.size} devices, "
            f"a program for {module.num_devices}",
            fix="pass the mesh that the program was lowered on",
        )
    if not rows:
        return Ledger((), mesh.shape)
    boundary = _boundary(compiled, results)
    reasons = Reasons(flow, mesh.shape, boundary, declared)
    return Ledger(tuple(_with_reason(reasons, *pair) for pair in rows), mesh.shape)


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
    reason = reasons.reason(node, row)
    declared = reasons.declaration(node, row) if reason == LAYOUT else None
    return dataclasses.replace(row, reason=reason, source=declared or row.source)


def _row(flow: Dataflow, node: Node, mesh: Mesh) -> Collective | None:
    instruction = node.instruction
    kind = kind_of(instruction)
    if not kind:
        return None
    groups = groups_of(instruction, mesh.size)
    axes = replica_groups.axes_of(groups, mesh.shape)
    if not axes:
        return None
    origin = cause(flow.module, node)
    dims = re.findall(r"\d+", instruction.attributes.get("dimensions", ""))
    return Collective(
        kind=kind,
        axes=axes,
        group_size=replica_groups.num_devices(axes, mesh.shape)
        if kind == "collective-permute"
        else len(groups[0]),
        arrays=arrays_of(node.computation, instruction),
        calls=node.calls,
        conditional=node.is_conditional,
        op_name=origin.op_name,
        source=user_line(flow.module.frames(origin)),
        instruction=instruction.name,
        dims=tuple(map(int, dims)),
    )


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


def _cells(row: Collective, shape: Mapping[str, int]) -> list[str]:
    axes, whole = "×".join(row.axes), replica_groups.num_devices(row.axes, shape)
    if row.axes != replica_groups.UNKNOWN and row.group_size < whole:
        axes = f"{axes} ({row.group_size} of {whole})"
    arrays = [str(array) for array in row.arrays]
    calls = "≥1" if row.calls is None else str(row.calls)
    return [
        row.kind,
        axes,
        arrays[0] if len(arrays) == 1 else f"{len(arrays)} arrays",
        format_bytes(row.nbytes),
        f"≤{calls}" if row.conditional and row.calls is not None else calls,
        format_bytes(row.total_bytes),
        row.reason or ("UNPLANNED, whole" if row.copies_whole else "UNPLANNED"),
        short(row.source) or "?",
        # The end says most; a combined collective has the names of all its parts.
        row.op_name if len(row.op_name) <= 60 else f"…{row.op_name[-59:]}",
    ]
