# SPDX-License-Identifier: Apache-2.0
"""Shows a ledger: rows, sums and notes."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any, Final, TypeAlias

from tessera.analysis import replica_groups
from tessera.analysis.collective import Advice, Collective, Total
from tessera.analysis.memory import format_bytes
from tessera.analysis.source_lines import short
from tessera.analysis.tables import WIDTH
from tessera.targets.target import Target

Cells: TypeAlias = list[list[str]]
Axes: TypeAlias = tuple[str, ...]

ROWS: Final = ("collective", "axes", "arrays", "calls", "bytes", "reason", "line", "op")
_TO_DO: Final = {
    "result": "declare {spec} for {names} in out_specs, and in in_specs where it comes "
    "back",
    "argument": "declare {spec} for {names} in in_specs, and in out_specs where it "
    "comes back: every device needs it whole",
    "value": "constrain the value to a layout between the two first: x = "
    "jax.lax.with_sharding_constraint(x, NamedSharding(mesh.jax, {spec}))",
}
SUMS: Final = ("axes", "collective", "operations", "calls", "bytes per device")


def title(target: Target | None) -> str:
    """Which compiler made the program, where its devices are not there."""
    if target is None:
        return ""
    if target.is_stand_in:
        return f"compiled for CPU, in place of {target.name}"
    return f"compiled for {target.name}"


def sent(by_link: Mapping[str, float]) -> str:
    """What a device sends over each level of links, where it uses several."""
    used = [f"{format_bytes(n)} over {link}" for link, n in by_link.items() if n]
    return f"a device sends {' and '.join(used)}" if len(used) > 1 else ""


def rows(collectives: Sequence[Collective], shape: Mapping[str, int]) -> Cells:
    """A line for each collective; one for those that differ in no more than a number.

    Such a number is that of a layer, in the names of operations.
    """
    alike: dict[Collective, list[str]] = {}
    for row in collectives:
        pattern = re.sub(r"\d+", "*", row.op_name)
        key = dataclasses.replace(row, instruction="", op_name=pattern, advice=None)
        alike.setdefault(key, []).append(row.op_name)
    return [
        _cells(row, names[0] if len({*names}) == 1 else row.op_name, len(names), shape)
        for row, names in alike.items()
    ]


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
    first, *others = found
    lines = [first, *_advice(collectives)] if unplanned else []
    return [*lines, *(note for note in others if found[note])]


def _advice(collectives: Sequence[Collective]) -> list[str]:
    """What to declare, at which line, and what that saves, where it is known."""
    alike: dict[tuple[Any, ...], list[Advice]] = {}
    for row in collectives:
        if row.advice is not None:
            key = (row.source, row.axes, row.advice.where, row.advice.spec)
            alike.setdefault(key, []).append(row.advice)
    lines = list[str]()
    for (source, axes, where, spec), found in alike.items():
        names = [name for advice in found for name in advice.names]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        do = _TO_DO[where].format(names=f"{', '.join(names[:3])}{more}", spec=spec)
        saved = format_bytes(sum(advice.saved_bytes for advice in found))
        text = f"{short(source) or '?'}: {do}; saves {saved} per step over {axes[0]}"
        lines += wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ")
    return lines


def _cells(
    row: Collective, op_name: str, count: int, shape: Mapping[str, int]
) -> list[str]:
    axes, whole = "×".join(row.axes), replica_groups.num_devices(row.axes, shape)
    if row.axes != replica_groups.UNKNOWN and row.group_size < whole:
        axes = f"{axes} ({row.group_size} of {whole})"
    if outside := [link for link, nbytes in row.sent[1:] if nbytes]:
        axes = f"{axes}, {outside[0]}"
    arrays = [str(array) for array in row.arrays]
    calls = "≥1" if row.calls is None else str(row.calls)
    calls = f"≤{calls}" if row.conditional and row.calls is not None else calls
    return [
        ("async " if row.is_async else "")
        + row.kind
        + (", sliced" if row.keeps_slice else ""),
        axes,
        arrays[0] if len(arrays) == 1 else f"{len(arrays)} arrays",
        calls if count == 1 else f"{count} × {calls}",
        format_bytes(count * row.total_bytes),
        row.reason or ("UNPLANNED, whole" if row.copies_whole else "UNPLANNED"),
        short(row.source) or "?",
        re.sub(r"^jit\([^()]*\)/", "", op_name),  # all are of one function
    ]
