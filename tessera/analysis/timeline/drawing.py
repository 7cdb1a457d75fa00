# SPDX-License-Identifier: Apache-2.0
"""Draws a timeline: as SVG that needs no other file, and as a trace for Perfetto.

The iterations of a loop are drawn as one that takes as long as all together, so widths
are shares of the step and a body is large enough to be seen.
"""

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any, Final

from tessera.analysis.tables import format_seconds
from tessera.analysis.timeline.event import COMPUTE, LOOP, Event

_WIDTH: Final = 1200
_LEFT: Final = 150
_LINE: Final = 16
_LANE: Final = 26
_THIN: Final = 0.15  # pixels, below which nothing can be seen
_TICKS: Final = 8
_COLORS: Final = {
    "matmul": "#3b6fb6",
    "attention": "#7b52ab",
    "other": "#8fa8c8",
    "copy": "#9a9a9a",
    "computation": "#8fa8c8",
}
_COLLECTIVE: Final = "#d9822b"
_WAITING: Final = "#f6d5d5"
_FONT: Final = 'font-family="sans-serif" font-size="11"'


def perfetto(events: Sequence[Event], title: str) -> dict[str, Any]:
    """The events in Chrome's trace format, times in microseconds.

    Args:
      events: Of one device.
      title: What they are.

    Source:
      "Trace Event Format", Google, section "Complete Events".
    """
    lanes = {stream: number for number, stream in enumerate(_streams(events))}
    entries: list[dict[str, Any]] = [_metadata("process_name", 0, title)]
    entries += [_metadata("thread_name", lane, name) for name, lane in lanes.items()]
    for event in events:
        start = round(event.start * 1e6, 3)
        end = round((event.start + event.duration) * 1e6, 3)
        entries.append(
            {
                "ph": "X",
                "pid": 0,
                "tid": lanes[event.stream],
                "name": f"{event.name} × {event.times:g}"
                if event.kind == LOOP
                else event.name,
                "cat": event.kind,
                "ts": start,
                "dur": round(end - start, 3),
                "args": {
                    "op": event.op_name,
                    "line": event.source,
                    "axes": "×".join(event.axes),
                    "seconds each": event.each,
                    "times": event.times,
                    "seconds waited for": event.exposed,
                },
            }
        )
    return {"traceEvents": entries, "displayTimeUnit": "ms"}


def _metadata(kind: str, lane: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": 0, "tid": lane, "name": kind, "args": {"name": name}}


def _streams(events: Sequence[Event]) -> list[str]:
    return list(dict.fromkeys([COMPUTE, *(event.stream for event in events)]))


def svg(events: Sequence[Event], seconds: float, header: Sequence[str]) -> str:
    """A picture of the events, one row for each stream and for each level of loops.

    Args:
      events: Of one device.
      seconds: Length of the time axis.
      header: Lines above the picture.
    """
    loops = _levels([event for event in events if event.kind == LOOP])
    others = [event for event in events if event.kind != LOOP]
    depth = 1 + max((level for _, level in loops), default=-1)
    top = _LINE * (len(header) + 2)
    streams = _streams(others)
    lanes = {name: top + _LINE * depth + _LANE * i for i, name in enumerate(streams)}
    bottom = top + _LINE * depth + _LANE * len(streams)
    scale = (_WIDTH - _LEFT - 10) / seconds if seconds else 0.0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" '
        f'height="{bottom + 30}" {_FONT}>',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    parts += [_text(10, _LINE * (i + 1), line) for i, line in enumerate(header)]
    width = _WIDTH - _LEFT - 10
    parts.append(_rect(_LEFT, lanes[COMPUTE], width, _LANE - 4, _WAITING, "waiting"))
    for event, level in loops:
        parts += _loop(event, top + _LINE * level, scale)
    for event in others:
        if event.duration * scale >= _THIN:
            x, color = _LEFT + event.start * scale, _COLORS.get(event.kind, _COLLECTIVE)
            y, size = lanes[event.stream], event.duration * scale
            parts.append(_rect(x, y, size, _LANE - 4, color, _description(event)))
    parts += [_text(10, y + _LINE, name) for name, y in lanes.items()]
    parts += _axis(seconds, scale, bottom)
    return "\n".join([*parts, "</svg>"])


def _levels(loops: Sequence[Event]) -> list[tuple[Event, int]]:
    """Each loop with the number of loops around it; outer ones come first."""
    open_until: list[float] = []
    levels = []
    for event in sorted(loops, key=lambda event: (event.start, -event.duration)):
        # Stretching leaves rounding errors at the ends.
        while open_until and event.start >= open_until[-1] * (1 - 1e-9):
            open_until.pop()
        levels.append((event, len(open_until)))
        open_until.append(event.start + event.duration)
    return levels


def _loop(event: Event, y: float, scale: float) -> Iterator[str]:
    x, width = _LEFT + event.start * scale, event.duration * scale
    if width < 1:
        return
    yield (
        f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_LINE - 3}" '
        f'fill="none" stroke="#666"><title>{escape(_description(event))}</title></rect>'
    )
    label = f"× {event.times:g}"
    if width > 8 * len(label):
        yield _text(x + 3, y + _LINE - 5, label)


def _description(event: Event) -> str:
    each, total = format_seconds(event.each), format_seconds(event.total)
    lines = [
        f"{event.name}: {event.kind} {'×'.join(event.axes)}".rstrip(),
        f"{event.times:g} × {each} = {total}",
        (f"waited for {format_seconds(event.exposed)}" if event.exposed else ""),
        event.op_name,
        event.source,
    ]
    return "\n".join(line for line in lines if line)


def _axis(seconds: float, scale: float, y: float) -> Iterator[str]:
    if not seconds:
        return
    rough = seconds / _TICKS
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * n for n in (1, 2, 5, 10) if size * n >= rough)
    for number in range(int(seconds / step) + 1):
        x = _LEFT + number * step * scale
        yield f'<path d="M{x:.2f} {y}v5" stroke="black"/>'
        yield _text(x, y + 17, format_seconds(number * step) if number else "0")


def _rect(
    x: float, y: float, width: float, height: float, color: str, title: str
) -> str:
    return (
        f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{height}" '
        f'fill="{color}"><title>{escape(title)}</title></rect>'
    )


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.2f}" y="{y}">{escape(text)}</text>'
