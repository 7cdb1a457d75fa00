# SPDX-License-Identifier: Apache-2.0
"""Renders the tables of reports as aligned text.

rich is not used here because it fits a table to the width of a terminal, while these
are the same in a log of any width.
"""

from collections.abc import Iterable, Sequence
from typing import Final

WIDTH: Final = 100
"""The characters of a line of a report, where its numbers leave enough of them."""

# A cell that is cut keeps so many.
_SHORTEST: Final = 12


def aligned(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Iterable[str] = (),
    cut: Iterable[str] = (),
) -> str:
    """Rows under their header, each column as wide as its widest cell.

    Args:
      header: Column names.
      rows: One cell per column.
      right: Names of the columns that are right-aligned, as numbers are.
      cut: Names of the columns that show only the ends of long cells, one after the
        other, where the table is wider than ``WIDTH``: the end of a path says most.

    Example:
      >>> rows = [["dp", "8"], ["dp×tp", "512"]]
      >>> print(aligned(["axis", "bytes"], rows, right=["bytes"]))
      axis   bytes
      dp         8
      dp×tp    512
    """
    table = [list(header), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    numbers = set(right)
    excess = sum(widths) + 2 * (len(widths) - 1) - WIDTH
    for index in (header.index(name) for name in cut):
        width = widths[index]
        least = max(len(header[index]), min(width, _SHORTEST))
        widths[index] = max(least, width - max(excess, 0))
        excess -= width - widths[index]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if name in numbers else _end(cell, width).ljust(width)
            for cell, width, name in zip(row, widths, header, strict=True)
        ).rstrip()
        for row in table
    )


def _end(cell: str, width: int) -> str:
    return cell if len(cell) <= width else f"…{cell[len(cell) - width + 1 :]}"


def format_seconds(seconds: float | None) -> str:
    """Seconds with a fitting unit, or a question mark where they are unknown.

    Example:
      >>> format_seconds(0.0021), format_seconds(None)
      ('2.10 ms', '?')
    """
    if seconds is None:
        return "?"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.2f} {unit}"
    return f"{seconds / 1e-6:.2f} µs"
