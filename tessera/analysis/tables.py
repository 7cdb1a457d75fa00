# SPDX-License-Identifier: Apache-2.0
"""Renders the tables of reports as aligned text and as HTML for notebooks.

rich is not used here because it fits a table to the width of a terminal, while these
are the same in a log of any width; and because what it exports as HTML is colored text,
without tables, without sections that fold, and with colors made for one background.

Every piece of HTML is self-contained: styles are on the elements, nothing is loaded and
nothing runs. Text has the color that the page gives it and backgrounds are translucent,
so that a dark page stays dark.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

_SHADED: Final = "border:1px solid rgba(128,128,128,.4);padding:.2em .6em"
_MAX_LINES: Final = 1000
_DIFF: Final = {
    "+": "background:rgba(46,160,67,.25)",
    "-": "background:rgba(248,81,73,.25)",
    "@": "opacity:.6",
}


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell with a background in HTML.

    Attributes:
      text: What it says.
      shade: Hue of the background, from 0 up to 1; None is only a border.
    """

    text: str
    shade: float | None = None

    def __str__(self) -> str:
        return self.text


def aligned(
    header: Sequence[str],
    rows: Iterable[Sequence[str | Cell]],
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
    table = [list(header), *(list(map(str, row)) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    numbers = set(right)
    return "\n".join(
        "  ".join(
            cell.rjust(width) if name in numbers else cell.ljust(width)
            for cell, width, name in zip(row, widths, header, strict=True)
        ).rstrip()
        for row in table
    )


def html_table(header: Sequence[str], rows: Iterable[Sequence[str | Cell]]) -> str:
    """A table; a cell may have several lines.

    Example:
      >>> html_table(["axis"], [["dp"]])
      '<table><tr><th>axis</th></tr><tr><td>dp</td></tr></table>'
    """
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join(f"<tr>{''.join(map(_html_cell, row))}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _html_cell(cell: str | Cell) -> str:
    style = ""
    if isinstance(cell, Cell):
        hue = "" if cell.shade is None else f"hsla({int(360 * cell.shade)},70%,50%,.3)"
        style = f' style="{_SHADED}{";background:" * bool(hue)}{hue}"'
    return f"<td{style}>{escape(str(cell)).replace(chr(10), '<br>')}</td>"


def html_lines(texts: Iterable[str]) -> str:
    """Preformatted text; only the first of very many lines."""
    return f"<pre>{escape(_first(texts))}</pre>"


def html_section(title: str, body: str) -> str:
    """A section that folds under its title.

    Args:
      title: Text.
      body: HTML.
    """
    return f"<details><summary>{escape(title)}</summary>{body}</details>"


def html_diff(text: str) -> str:
    """A unified diff, added lines on green and removed lines on red."""
    body = "".join(
        f'<span style="{style}">{escape(line)}</span>\n'
        if (style := _DIFF.get(line[:1]))
        else f"{escape(line)}\n"
        for line in _first([text]).split("\n")
    )
    return f"<pre>{body}</pre>"


def _first(texts: Iterable[str]) -> str:
    lines = "\n".join(texts).split("\n")
    hidden = len(lines) - _MAX_LINES
    more = [f"… {hidden} more lines"] if hidden > 0 else []
    return "\n".join([*lines[:_MAX_LINES], *more])


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
