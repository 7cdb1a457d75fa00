# SPDX-License-Identifier: Apache-2.0
"""Curves for Plotly.js, with a sentence and a table that say the same.

A figure is the JSON that Plotly draws; Plotly's Python classes would check it and write
the same. Plotly reads its texts as a kind of HTML, so they are escaped as well.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from math import isfinite
from typing import Any, Final

from tessera.train.report.markup import (
    Html,
    details,
    json_script,
    paragraph,
    table,
    text,
)
from tessera.train.report.run_files import Series

MOST_POINTS: Final = 2000
"""Points of one curve in the report."""

# Runs differ in more than color.
_DASHES: Final = ("solid", "dash", "dot", "dashdot", "longdash")


def label(value: object, longest: int = 40) -> str:
    """A text as Plotly shows it: escaped, and no wider than the screen of a phone."""
    name = str(value)
    return text(name if len(name) <= longest else f"…{name[1 - longest :]}")


def axis(title: str, **options: Any) -> dict[str, Any]:
    """An axis with a title."""
    return {"title": {"text": label(title)}, **options}


def number(value: float | None) -> str:
    """A number of a table: to four digits, or whole from a thousand on.

    Example:
      >>> number(1234567.8), number(0.000123456), number(12), number(None)
      ('1,234,568', '0.0001235', '12', '–')
    """
    if value is None:
        return "–"
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e12 else f"{value:.4g}"


def utc(seconds: float) -> str:
    """A time of UTC, from seconds since 1970.

    Example:
      >>> utc(0.0), utc(1e300)
      ('1970-01-01 00:00:00', 'an unknown time')
    """
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        return "an unknown time"


def counted(number: int, what: str) -> str:
    """A number of things, of which one has no plural.

    Example:
      >>> counted(1, "step"), counted(1200, "step")
      ('1 step', '1,200 steps')
    """
    return f"{number:,} {what}" + ("s" if number != 1 else "")


def line_chart(
    title: str, unit: str, curves: Mapping[str, Series], *, log: bool = False
) -> Html:
    """Curves over steps, which a reader can zoom.

    Args:
      title: What is drawn.
      unit: The title of the vertical axis.
      curves: By name, none of them empty.
      log: Whether the vertical axis is logarithmic.
    """
    traces: list[dict[str, Any]] = []
    rows: list[tuple[object, ...]] = []
    words: list[str] = []
    for index, (name, series) in enumerate(curves.items()):
        steps, values = [*series], [*series.values()]
        x, y = downsample(steps, values)
        few = len(x) < 40
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if few else "lines",
                "name": label(name),
                "x": x,
                "y": y,
                "line": {"dash": _DASHES[index % len(_DASHES)], "width": 2},
            }
        )
        words.append(_sentence(name, steps, values))
        finite = [(v, s) for s, v in series.items() if isfinite(v)]
        low, high = (min(finite), max(finite)) if finite else ((None, 0), (None, 0))
        cells = (len(steps), values[-1], steps[-1], *low, *high)
        rows.append((name, *map(number, cells)))
    longest = max(map(len, curves.values()))
    if longest > MOST_POINTS:
        words.append(f"Drawn are the lowest and highest of groups of {longest:,} steps")
    thousands = {"separatethousands": True, "exponentformat": "none"}
    layout = {
        "xaxis": axis("step", **thousands),
        "yaxis": axis(unit, type="log") if log else axis(unit, **thousands),
        "showlegend": len(curves) > 1,
        "hovermode": "x unified",
    }
    header = ("curve", "points", "last", "at step", "lowest", "at", "highest", "at")
    sentence, heading = ". ".join(words) + ".", text(title)
    numbers = details(f"Numbers of “{title}”", table(title, header, rows))
    return Html(
        f'<figure><h3>{heading}</h3><div class="chart" tabindex="0" role="group" '
        f'aria-label="Chart: {heading}. {text(sentence)}"></div>'
        f"{json_script({'data': traces, 'layout': layout}, 'figure')}"
        f"<figcaption>{paragraph(sentence)}{numbers}</figcaption></figure>"
    )


def _sentence(name: str, steps: Sequence[int], values: Sequence[float]) -> str:
    first, last = number(values[0]), number(values[-1])
    words = f"{name}: {first} at step {steps[0]:,}"
    if len(steps) > 1:
        words += f", {last} at step {steps[-1]:,}"
    if bad := [s for s, v in zip(steps, values, strict=True) if not isfinite(v)]:
        shown = ", ".join(f"{step:,}" for step in bad[:5])
        words += f"; not finite at {counted(len(bad), 'step')}: {shown}" + (
            "…" if len(bad) > 5 else ""
        )
    return words


def downsample(
    steps: Sequence[int], values: Sequence[float], most: int = MOST_POINTS
) -> tuple[list[int], list[float | None]]:
    """The lowest and the highest point of each bucket, of a curve with too many.

    So every spike stays. A value that is not finite stays as a gap of its bucket.

    Args:
      steps: In rising order.
      values: One for each step.
      most: The most points to leave, gaps aside; at least 4.

    Returns:
      Steps and values, where None is a gap: a value that is not finite.

    Example:
      >>> downsample(range(6), [0, 9, 1, 1, -9, 1], most=4)
      ([0, 1, 4, 5], [0, 9, -9, 1])
    """
    chosen: list[int] = [*range(len(steps))]
    if len(steps) > most:
        size = -(-len(steps) // ((most - 2) // 2))
        picked = {0, len(steps) - 1}
        for start in range(0, len(steps), size):
            bucket = range(start, min(start + size, len(steps)))
            finite = [i for i in bucket if isfinite(values[i])]
            if finite:
                picked.add(min(finite, key=values.__getitem__))
                picked.add(max(finite, key=values.__getitem__))
            if len(finite) < len(bucket):
                picked.add(next(i for i in bucket if not isfinite(values[i])))
        chosen = sorted(picked)
    return (
        [steps[i] for i in chosen],
        [values[i] if isfinite(values[i]) else None for i in chosen],
    )
