# SPDX-License-Identifier: Apache-2.0
"""Renders the tables of reports as aligned text.

rich is not used here because it fits a table to the width of a terminal, while these
are the same in a log of any width.
"""

from collections.abc import Iterable, Sequence


def aligned(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Iterable[str] = (),
) -> str:
    """Rows under their header, each column as wide as its widest cell.

    Args:
      header: Column names.
      rows: One cell per column.
      right: Names of the columns that are right-aligned, as numbers are.

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
    return "\n".join(
        "  ".join(
            cell.rjust(width) if name in numbers else cell.ljust(width)
            for cell, width, name in zip(row, widths, header, strict=True)
        ).rstrip()
        for row in table
    )


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
