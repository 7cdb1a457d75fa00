# SPDX-License-Identifier: Apache-2.0
"""Draws pipeline schedules as a table of text or an SVG picture."""

from html import escape
from string import ascii_lowercase
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tessera.graph.pipelining.schedule_table import Op, Schedule

# Blue, green and orange that people with any kind of color vision can tell apart.
COLORS = {"F": "#56b4e9", "B": "#009e73", "W": "#e69f00"}
MEANINGS = {"F": "forward", "B": "backward", "W": "gradient of weights"}
UNIT, ROW, LEFT, TOP = 22.0, 24.0, 74.0, 34.0


def as_text(schedule: "Schedule") -> str:
    """A row per device and a column per tick, under one line of sizes."""
    lettered = schedule.chunks > 1
    columns = [["tick", *(f"device {d}" for d in range(schedule.stages))]]
    for tick, row in enumerate(schedule.cells):
        cells = [" ".join(_label(op, lettered) for op in cell) for cell in row]
        columns.append([str(tick), *cells])
    widths = [max(map(len, column)) for column in columns]
    rows = [
        " | ".join(map(str.ljust, row, widths)).rstrip()
        for row in zip(*columns, strict=True)
    ]
    return "\n".join([schedule.summary(), *rows])


def as_svg(schedule: "Schedule") -> str:
    """A self-contained picture: time to the right, a row per device, a box per op.

    A tick is as wide as its longest device, at the default costs of
    ``Schedule.costs``, so white space is idle time.
    """
    lettered = schedule.chunks > 1
    lasts = schedule.costs().max(axis=1) * schedule.chunks * UNIT
    starts = LEFT + np.concatenate([[0.0], np.cumsum(lasts)])
    width, height = starts[-1] + 10, TOP + ROW * schedule.stages + 30
    prices = {"F": 1.0, "B": 1.0 if schedule.splits_backward else 2.0, "W": 1.0}
    boxes = [_text(8, 20, schedule.summary(), 'font-weight="bold"')]
    for device in range(schedule.stages):
        boxes.append(_text(8, TOP + ROW * device + 16, f"device {device}"))
    for tick, row in enumerate(schedule.cells):
        for device, cell in enumerate(row):
            left, top = float(starts[tick]), TOP + ROW * device
            for op in cell:
                wide = prices[op.kind] * UNIT
                boxes.append(_box(op, left, top, wide, _label(op, lettered)[1:]))
                left += wide
    left = LEFT
    for kind in ("F", "B", "W") if schedule.splits_backward else ("F", "B"):
        boxes.append(
            f'<rect x="{left:g}" y="{height - 20:g}" width="12" height="12" '
            f'fill="{COLORS[kind]}"/>' + _text(left + 17, height - 10, MEANINGS[kind])
        )
        left += 90
    width = max(width, 420.0)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" '
        f'height="{height:g}" viewBox="0 0 {width:g} {height:g}">'
        f"<title>{escape(schedule.summary())}</title>"
        '<rect width="100%" height="100%" fill="#fff"/>'
        '<g font-family="sans-serif" font-size="11">' + "".join(boxes) + "</g></svg>"
    )


def _label(op: "Op", lettered: bool) -> str:
    chunk = ascii_lowercase[op.chunk : op.chunk + 1] or f".{op.chunk}"
    return f"{op.kind}{op.microbatch}{chunk if lettered else ''}"


def _box(op: "Op", left: float, top: float, wide: float, label: str) -> str:
    # Later chunks are paler, to tell the chunks of an interleaved schedule apart.
    opacity = 1.0 - 0.45 * min(op.chunk, 3) / 3
    return (
        f'<rect x="{left:g}" y="{top:g}" width="{wide:g}" height="{ROW - 2:g}" '
        f'fill="{COLORS[op.kind]}" fill-opacity="{opacity:g}" stroke="#fff"/>'
        + _text(left + wide / 2, top + 15, label, 'text-anchor="middle"')
    )


def _text(x: float, y: float, text: str, style: str = "") -> str:
    # Attributes, as a style sheet would apply to the whole page with the picture.
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(text)}</text>'
