# SPDX-License-Identifier: Apache-2.0
"""Draws the layouts of an answer by time and memory, and the front of the best."""

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import Final

from tessera.analysis.memory import format_bytes
from tessera.analysis.tables import format_seconds
from tessera.planner.answer import Answer, describe
from tessera.planner.search import Candidate

_WIDTH: Final = 760
_HEIGHT: Final = 440
_LEFT: Final = 80
_TOP: Final = 50
_RIGHT: Final = 20
_BOTTOM: Final = 60
_TICKS: Final = 5
_STYLE: Final = (
    "text{font:12px sans-serif;fill:#333}.t{font-size:14px;font-weight:bold}"
    ".g{stroke:#ddd}.f{fill:none;stroke:#1f6feb;stroke-width:2}"
    ".c{fill:#9aa4b2;opacity:.6}.b{fill:#1f6feb}.m{stroke:#d1242f;stroke-dasharray:5 4}"
)


def pareto_svg(answer: Answer) -> str:
    """A picture of its own: seconds of a step against memory of a device, both in logs.

    Each point has a title that says which layout it is; the blue line joins those that
    no other beats in both, the red one is the memory of a device.
    """
    points = answer.found.best + answer.found.front
    scale = _Scale(points, answer.target.machine.memory_bytes)
    body = "\n".join(_parts(answer, scale))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'role="img"><style>{_STYLE}</style>\n{body}\n</svg>\n'
    )


class _Scale:
    """From bytes and seconds to places in the picture."""

    def __init__(self, points: Sequence[Candidate], capacity: int) -> None:
        memory = [float(each.prediction.memory_bytes) for each in points]
        seconds = [each.prediction.seconds for each in points]
        self.memory = min(memory) / 1.1, max(*memory, float(capacity)) * 1.05
        self.seconds = min(seconds) / 1.1, max(seconds) * 1.1

    def x(self, nbytes: float) -> float:
        """From the left."""
        share = _share(nbytes, *self.memory)
        return round(_LEFT + share * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(self, seconds: float) -> float:
        """From the top: slower steps are higher."""
        share = _share(seconds, *self.seconds)
        return round(_HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM), 1)


def _share(value: float, low: float, high: float) -> float:
    return (math.log(value) - math.log(low)) / (math.log(high) - math.log(low))


def _ticks(low: float, high: float) -> list[float]:
    step = (math.log(high) - math.log(low)) / _TICKS
    return [math.exp(math.log(low) + step * i) for i in range(_TICKS + 1)]


def _parts(answer: Answer, scale: _Scale) -> Iterator[str]:
    name = escape(f"{answer.space.config.model.name} on {answer.target.name}")
    yield f'<text class="t" x="{_LEFT}" y="24">{name}: a step, by layout</text>'
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    for nbytes in _ticks(*scale.memory):
        x = scale.x(nbytes)
        yield f'<line class="g" x1="{x}" x2="{x}" y1="{_TOP}" y2="{bottom}"/>'
        yield _text(x, bottom + 18, format_bytes(nbytes), "middle")
    for seconds in _ticks(*scale.seconds):
        y = scale.y(seconds)
        yield f'<line class="g" x1="{_LEFT}" x2="{right}" y1="{y}" y2="{y}"/>'
        yield _text(_LEFT - 6, y + 4, format_seconds(seconds), "end")
    yield _text((_LEFT + right) / 2, _HEIGHT - 14, "memory of a device", "middle")
    limit = scale.x(answer.target.machine.memory_bytes)
    yield f'<line class="m" x1="{limit}" x2="{limit}" y1="{_TOP}" y2="{bottom}"/>'
    for each in answer.found.best:
        yield _point(each, scale, "c", 3)
    places = [
        f"{scale.x(each.prediction.memory_bytes)},{scale.y(each.prediction.seconds)}"
        for each in answer.found.front
    ]
    yield f'<polyline class="f" points="{" ".join(places)}"/>'
    for each in answer.found.front:
        yield _point(each, scale, "b", 4)


def _point(candidate: Candidate, scale: _Scale, kind: str, radius: int) -> str:
    found = candidate.prediction
    x, y = scale.x(found.memory_bytes), scale.y(found.seconds)
    title = (
        f"{describe(candidate.layout)}: {format_seconds(found.seconds)}, "
        f"{format_bytes(found.memory_bytes)}"
    )
    return (
        f'<circle class="{kind}" cx="{x}" cy="{y}" r="{radius}">'
        f"<title>{escape(title)}</title></circle>"
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'
