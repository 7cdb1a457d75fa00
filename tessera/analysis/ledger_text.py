# SPDX-License-Identifier: Apache-2.0
"""Shows a ledger: rows, sums and notes."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

from tessera.analysis import replica_groups
from tessera.analysis.collective import Collective, Total
from tessera.analysis.memory import format_bytes
from tessera.analysis.source_lines import short
from tessera.targets.target import Target

Cells: TypeAlias = list[list[str]]
Axes: TypeAlias = tuple[str, ...]

# fmt: off
ROWS: Final = (
    "collective", "axes", "arrays", "bytes", "calls", "total", "reason", "line", "op",
)
# fmt: on
SUMS: Final = ("axes", "collective", "operations", "calls", "bytes per device")


def title(target: Target | None) -> str:
    """Which compiler made the program, where its devices are not there."""
    if target is None:
        return ""
    if target.is_stand_in:
        return f"compiled for CPU, in place of {target.name}"
    return f"compiled for {target.name}"


def rows(collectives: Sequence[Collective], shape: Mapping[str, int]) -> Cells:
    """A line for each collective; one for those that are alike in all that it shows."""
    alike: dict[Collective, int] = {}
    for row in collectives:
        key = dataclasses.replace(row, instruction="")
        alike[key] = alike.get(key, 0) + 1
    return [_cells(row, count, shape) for row, count in alike.items()]


def sums(
    by_axis: Mapping[Axes, Total], totals: Mapping[tuple[Axes, str], Total]
) -> Cells:
    """Per combination of axes its kinds, and their sum where there are several."""
    lines = []
    for axes, sum_of_axes in by_axis.items():
        kinds = {kind: total for (over, kind), total in totals.items() if over == axes}
        if len(kinds) > 1:
            kinds["together"] = sum_of_axes
        for kind, total in kinds.items():
            counts = [str(total.operations), str(total.calls)]
            lines.append(["×".join(axes), kind, *counts, format_bytes(total.nbytes)])
    return lines


def notes(collectives: Sequence[Collective]) -> list[str]:
    """What the signs in the tables mean, and what is wrong."""
    unplanned = sum(not row.is_planned for row in collectives)
    found = {
        f"UNPLANNED: {unplanned} that no declared layout implies": unplanned > 0,
        "whole: copied whole to every device, which slices it again": any(
            row.copies_whole for row in collectives
        ),
        "sliced: each device keeps its part of the sum, as of a reduce-scatter": any(
            row.keeps_slice for row in collectives
        ),
        "unknown: a kind that Tessera does not know, counted by its operands": any(
            row.kind.startswith("unknown") for row in collectives
        ),
        "async: the program computes while it is under way, where it can": any(
            row.is_async for row in collectives
        ),
        "≥: in a loop of unknown length, which counts once": any(
            row.calls is None for row in collectives
        ),
        "≤: in a branch, which counts as taken": any(
            row.conditional for row in collectives
        ),
    }
    return [note for note, applies in found.items() if applies]


def _cells(row: Collective, count: int, shape: Mapping[str, int]) -> list[str]:
    axes, whole = "×".join(row.axes), replica_groups.num_devices(row.axes, shape)
    if row.axes != replica_groups.UNKNOWN and row.group_size < whole:
        axes = f"{axes} ({row.group_size} of {whole})"
    arrays = [str(array) for array in row.arrays]
    calls = "≥1" if row.calls is None else str(row.calls)
    calls = f"≤{calls}" if row.conditional and row.calls is not None else calls
    return [
        ("async " if row.is_async else "")
        + row.kind
        + (", sliced" if row.keeps_slice else ""),
        axes,
        arrays[0] if len(arrays) == 1 else f"{len(arrays)} arrays",
        format_bytes(row.nbytes),
        calls if count == 1 else f"{count} × {calls}",
        format_bytes(count * row.total_bytes),
        row.reason or ("UNPLANNED, whole" if row.copies_whole else "UNPLANNED"),
        short(row.source) or "?",
        # The end says most; a combined collective has the names of all its parts.
        row.op_name if len(row.op_name) <= 60 else f"…{row.op_name[-59:]}",
    ]
