# SPDX-License-Identifier: Apache-2.0
"""Makes HTML of text that is not trusted.

Functions that take text escape it; those that take ``Html`` do not. Control characters
and surrogates, which HTML or UTF-8 cannot hold, are shown as escape sequences.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, NewType

from tessera.errors import printable

Html = NewType("Html", str)


def text(value: object) -> Html:
    r"""Escape text for HTML, in an attribute too.

    Example:
      >>> text('<b a="1">\x1b\ud800')
      '&lt;b a=&quot;1&quot;&gt;\\x1b\\ud800'
    """
    return Html(escape(printable(str(value), keep="\n\t")))


def paragraph(value: object, kind: str = "") -> Html:
    """A paragraph of text, of a class of the style sheet."""
    name = f' class="{kind}"' if kind else ""
    return Html(f"<p{name}>{text(value)}</p>")


def join(parts: Iterable[Html]) -> Html:
    """Pieces of HTML, one after the other."""
    return Html("".join(parts))


def table(
    caption: str,
    header: Sequence[object],
    rows: Iterable[Sequence[object]],
    marked: Iterable[int] = (),
) -> Html:
    """A table that scrolls by itself where it is wider than the page.

    Args:
      caption: What it is of.
      header: The columns.
      rows: Their cells, the first of which is the heading of its row.
      marked: The numbers of rows to highlight.
    """
    marks = set(marked)
    heads = "".join(f'<th scope="col">{text(name)}</th>' for name in header)
    lines: list[str] = []
    for number, (first, *others) in enumerate(rows):
        kind = ' class="marked"' if number in marks else ""
        cells = "".join(f"<td>{_cell(cell)}</td>" for cell in others)
        lines.append(f'<tr{kind}><th scope="row">{_cell(first)}</th>{cells}</tr>')
    return Html(
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(caption)}">'
        f"<table><caption>{text(caption)}</caption><thead><tr>{heads}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def columns_table(caption: str, columns: Mapping[str, Mapping[str, object]]) -> Html:
    """A table with a column for each mapping, and a row for each of their names.

    Args:
      caption: What it shows.
      columns: By heading; what a column lacks is "–".
    """
    names = dict.fromkeys(name for column in columns.values() for name in column)
    rows = [(name, *(c.get(name, "–") for c in columns.values())) for name in names]
    return table(caption, ("", *columns), rows)


def _cell(value: object) -> str:
    """Text that goes on in the next line between the words of a long setting."""
    return text(value).replace("_", "_<wbr>").replace("=", "=<wbr>")


def details(summary: str, body: Html) -> Html:
    """What is shown when a reader asks for it, or prints."""
    return Html(f"<details><summary>{text(summary)}</summary>{body}</details>")


def json_script(value: Any, kind: str = "") -> Html:
    """A value as JSON in an element that the page's script reads."""
    name = f' class="{kind}"' if kind else ""
    # No "</script>" or "<!--" can occur in it.
    data = json.dumps(value, allow_nan=False, separators=(",", ":"))
    data = data.replace("<", "\\u003c")
    return Html(f'<script type="application/json"{name}>{data}</script>')
