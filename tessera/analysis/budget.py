# SPDX-License-Identifier: Apache-2.0
"""Checks communication budgets: ``ledger.assert_budget(tp="40MB", unplanned=0)``."""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence

from tessera.analysis.collective import Collective
from tessera.analysis.memory import format_bytes
from tessera.analysis.source_lines import short
from tessera.errors import BudgetError, BudgetFormError, did_you_mean

_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?)\s*([kKMGT]?)(i?)B\s*")
_MAX_LINES = 5
_CONSTRAINT = "jax.lax.with_sharding_constraint(x, NamedSharding(mesh.jax, {}))"
_OTHERWISE = (
    "raise the budget, or declare other layouts at the lines above; "
    "print(ledger.as_text()) shows every collective"
)


def parse_bytes(size: int | str, what: str = "a budget") -> int:
    """A number of bytes, from an integer or from text with a unit.

    Args:
      size: ``1024``, ``"40MB"`` (powers of 1000), ``"1.5GiB"`` (powers of 1024).
      what: What an error calls it.

    Raises:
      BudgetFormError: [T210] it is neither.

    Example:
      >>> parse_bytes("40MB"), parse_bytes("1.5 GiB"), parse_bytes(7)
      (40000000, 1610612736, 7)
    """
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if match is None:
        raise BudgetFormError(
            f"{what} is not a number of bytes",
            got=repr(size),
            fix='use an integer of 0 or more, or text such as "40MB" or "1.5GiB"',
        )
    number, prefix, binary = match.groups()
    power = " KMGT".index(prefix.upper() or " ")
    return int(float(number) * (1024 if binary else 1000) ** power)


def check(
    rows: Sequence[Collective],
    mesh_shape: Mapping[str, int],
    sizes: Mapping[str | tuple[str, ...], int | str | None],
    calls: Mapping[str, int],
) -> None:
    """Raise for every budget that is exceeded, all at once.

    Args:
      rows: The rows of a ledger.
      mesh_shape: Size of each axis of its mesh.
      sizes: By axis, combination of axes, ``"total"`` or ``"unplanned"``; None is no
        budget.
      calls: The most calls, by the same names.

    Raises:
      BudgetError: [T209] a budget is exceeded.
      BudgetFormError: [T210] a budget is not a size, or an axis does not exist.
    """
    exceeded: dict[str, list[Collective]] = {}
    for name, size in sizes.items():
        selected, label = _selected(rows, mesh_shape, name), _label(name)
        if size is None:
            continue
        limit = parse_bytes(size, f"the budget of {label}")
        sent = sum(row.total_bytes for row in selected)
        if sent > limit:
            amount = f"{format_bytes(sent)} = {sent:,} bytes"
            exceeded[f"{label}: {amount}, at most {format_bytes(limit)}"] = selected
    for name, limit in calls.items():
        selected = _selected(rows, mesh_shape, name)
        made = sum(row.counted_calls for row in selected)
        if made > limit:
            text = f"{_label(name)}: {made:,} calls, at most {limit:,}"
            exceeded[text] = selected
    if exceeded:
        lines = [[text, *_lines(each)] for text, each in exceeded.items()]
        senders = itertools.chain.from_iterable(exceeded.values())
        raise BudgetError(
            "the program sends more than its budget allows",
            got="\n".join(itertools.chain.from_iterable(lines)),
            fix="\n".join([*_constraints(senders), _OTHERWISE]),
        )


def _selected(
    rows: Iterable[Collective],
    mesh_shape: Mapping[str, int],
    name: str | tuple[str, ...],
) -> list[Collective]:
    """The rows that a budget is for."""
    if name == "total":
        return list(rows)
    if name == "unplanned":
        return [row for row in rows if not row.is_planned]
    for axis in (name,) if isinstance(name, str) else name:
        if axis not in mesh_shape:
            raise BudgetFormError(
                f"a budget is for mesh axis {axis!r}, which the program does not have",
                got=f"axes {tuple(mesh_shape)}",
                fix=did_you_mean(axis, [*mesh_shape, "total", "unplanned"]),
            )
    if isinstance(name, str):
        return [row for row in rows if name in row.axes]
    return [row for row in rows if set(row.axes) == set(name)]


def _label(name: str | tuple[str, ...]) -> str:
    return name if isinstance(name, str) else "×".join(name)


def _by_size(rows: Iterable[Collective]) -> list[Collective]:
    return sorted(rows, key=lambda row: -row.total_bytes)


def _lines(rows: Sequence[Collective]) -> list[str]:
    """The rows that send most, each with its source line."""
    shown = [
        f"  {format_bytes(row.total_bytes)} {row.kind} over {'×'.join(row.axes)} at "
        f"{short(row.source) or '?'}{'' if row.is_planned else ', unplanned'}"
        for row in _by_size(rows)[:_MAX_LINES]
    ]
    hidden = len(rows) - len(shown)
    return [*shown, f"  and {hidden} more"] if hidden > 0 else shown


def _constraints(rows: Iterable[Collective]) -> list[str]:
    """For the unplanned rows that send most, the line and the constraint to write."""
    lines = [
        f"at {short(row.source) or '?'} {_constraint(row)}"
        for row in _by_size(rows)
        if not row.is_planned
    ]
    return list(dict.fromkeys(lines))[:_MAX_LINES]


def _constraint(row: Collective) -> str:
    if row.kind == "all-gather":
        arrays = ", ".join(map(str, row.arrays))
        return f"keep {arrays} split: {_CONSTRAINT.format(_split_spec(row))}"
    axes = "×".join(row.axes)
    return (
        f"split the array over {axes} before and after the operation along one dim "
        f"that it treats entry by entry: {_CONSTRAINT.format('P(...)')}"
    )


def _split_spec(row: Collective) -> str:
    """The layout that an all-gather undoes: ``P(P.UNCONSTRAINED, 'tp')``.

    The other dims are left to XLA: None would make them whole on every device.
    """
    axes = row.axes[0] if len(row.axes) == 1 else row.axes
    dim = row.dims[0] if row.dims else 0
    rank = max(len(array.dims) for array in row.arrays)
    entries = ["P.UNCONSTRAINED"] * max(rank, dim + 1)
    entries[dim] = repr(axes)
    return f"P({', '.join(entries)})"
