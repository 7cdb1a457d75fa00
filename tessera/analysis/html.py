# SPDX-License-Identifier: Apache-2.0
"""The few pieces of HTML that reports render as in a notebook.

Each is complete in itself: styles are on the elements, nothing is loaded, nothing runs.
Text has the color that the page gives it and backgrounds are translucent, so that a
dark page stays dark.
"""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

from tessera.analysis.layout_figures import Cell, Grid, Picture

_CELL: Final = "border:1px solid rgba(128,128,128,.4);padding:.2em .6em"
_SIDE: Final = "display:inline-block;vertical-align:top;margin:0 1em 1em 0"
_MAX_LINES: Final = 1000
_DIFF: Final = {
    "+": "background:rgba(46,160,67,.25)",
    "-": "background:rgba(248,81,73,.25)",
    "@": "opacity:.6",
}


def lines(texts: Iterable[str]) -> str:
    """Lines of text, as they stand; of very many the first."""
    text = "\n".join(_first(texts))
    return f"<pre>{escape(text)}</pre>"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A plain table of text; a cell may have several lines.

    Example:
      >>> table(["axis"], [["dp"]])
      '<table><tr><th>axis</th></tr><tr><td>dp</td></tr></table>'
    """
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{_broken(cell)}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def section(title: str, body: str, *, is_open: bool = False) -> str:
    """A part of a report under its title, which opens and closes.

    Args:
      title: Text.
      body: HTML.
      is_open: Whether it begins open.
    """
    opened = " open" * is_open
    return f"<details{opened}><summary>{escape(title)}</summary>{body}</details>"


def picture(drawn: Picture) -> str:
    """Blocks of an array as cells, each in a color of its own, with its devices."""
    more = f"<div>… {drawn.hidden} more such grids</div>" * bool(drawn.hidden)
    return "<div>" + "".join(map(_grid, drawn.grids)) + more + "</div>"


def diff(text: str) -> str:
    """A unified diff, what is new on green and what is gone on red."""
    body = "".join(
        f'<span style="{style}">{escape(line)}</span>\n'
        if (style := _DIFF.get(line[:1]))
        else f"{escape(line)}\n"
        for line in _first(text.splitlines())
    )
    return f"<pre>{body}</pre>"


def _first(texts: Iterable[str]) -> list[str]:
    every = "\n".join(texts).split("\n")
    hidden = len(every) - _MAX_LINES
    return [*every[:_MAX_LINES], f"… {hidden} more lines"] if hidden > 0 else every


def _grid(grid: Grid) -> str:
    caption = f"<div>{escape(grid.caption)}</div>" if grid.caption else ""
    corner = " / ".join(filter(None, (grid.down[0], grid.across[0])))
    head = "".join(f"<th>{escape(label)}</th>" for label in grid.across[1])
    body = "".join(
        f"<tr><th>{escape(label)}</th>{''.join(map(_block, row))}</tr>"
        for label, row in zip(grid.down[1], grid.cells, strict=True)
    )
    return (
        f'<div style="{_SIDE}">{caption}<table><tr><th>{escape(corner)}</th>{head}</tr>'
        f"{body}</table></div>"
    )


def _block(cell: Cell) -> str:
    style = _CELL
    if cell.shade is not None:
        style += f";background:hsla({int(360 * cell.shade)},70%,50%,.3)"
    return f'<td style="{style}">{escape(cell.text)}</td>'


def _broken(cell: str) -> str:
    return escape(cell).replace("\n", "<br>")
