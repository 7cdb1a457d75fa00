# SPDX-License-Identifier: Apache-2.0
"""Aligned tables of text, as every analysis prints them."""

from collections.abc import Iterable, Sequence


def aligned(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[str] = ()
) -> str:
    """Rows under their header, each column as wide as its widest cell.

    Args:
      header: Column names.
      rows: One cell per column.
      right: Names of the columns that are set flush right, as numbers are.

    Example:
      >>> rows = [["dp", "8"], ["dp×tp", "512"]]
      >>> print(aligned(["axis", "bytes"], rows, right=["bytes"]))
      axis   bytes
      dp         8
      dp×tp    512
    """
    table = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    flush = [name in set(right) for name in header]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, flush, strict=True)
        ).rstrip()
        for row in table
    )
