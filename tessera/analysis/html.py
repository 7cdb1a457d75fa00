# SPDX-License-Identifier: Apache-2.0
"""The few pieces of HTML that inspections render as in a notebook."""

from collections.abc import Iterable, Sequence
from html import escape

MAX_CELLS = 32
MAX_IDS = 8


def lines(texts: Iterable[str]) -> str:
    """Lines of text, as they stand."""
    return f"<pre>{escape(chr(10).join(texts))}</pre>"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A plain table of text.

    Example:
      >>> table(["axis"], [["dp"]])
      '<table><tr><th>axis</th></tr><tr><td>dp</td></tr></table>'
    """
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def grid(cells: Sequence[Sequence[Sequence[int]]]) -> str:
    """Blocks of an array as cells, each in a color of its own, with its device ids."""
    height, width = len(cells), max(map(len, cells), default=0)
    if height > MAX_CELLS or width > MAX_CELLS:
        return lines([f"{height} × {width} blocks: too many to draw"])
    body = ""
    for i, row in enumerate(cells):
        body += "<tr>"
        for j, ids in enumerate(row):
            hue = 360 * (i * width + j) // (height * width)
            style = f"background:hsl({hue},70%,80%);color:black;text-align:center"
            body += f'<td style="{style}">{_ids(ids)}</td>'
        body += "</tr>"
    return f"<table>{body}</table>"


def _ids(ids: Sequence[int]) -> str:
    shown = " ".join(map(str, ids[:MAX_IDS]))
    return shown + (f" … {len(ids)} devices" if len(ids) > MAX_IDS else "")
