# SPDX-License-Identifier: Apache-2.0
"""Charts for Plotly.js, each with a sentence and a table that say the same.

A figure is the JSON that Plotly draws; Plotly's Python classes would check it and write
the same. Plotly reads its texts as a kind of HTML, so they are escaped as well.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Final

from tessera.train.report.downsample import MOST_POINTS, downsample
from tessera.train.report.markup import (
    Html,
    details,
    json_script,
    paragraph,
    table,
    text,
)
from tessera.train.report.run_files import Series

# Runs differ in more than color.
_DASHES: Final = ("solid", "dash", "dot", "dashdot", "longdash")


@dataclass(frozen=True)
class Chart:
    """A chart, and what it says in words and numbers.

    Attributes:
      title: Its heading.
      sentence: What it shows, for those who do not see it.
      traces: Of Plotly, whose texts ``label`` has escaped.
      layout: Of Plotly.
      header: The columns of the table of its main numbers.
      rows: Its rows.
    """

    title: str
    sentence: str
    traces: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any]
    header: Sequence[object]
    rows: Sequence[Sequence[object]] = field(default_factory=tuple)

    def as_html(self) -> Html:
        """A figure with heading, drawing, sentence and table."""
        figure = json_script({"data": self.traces, "layout": self.layout}, "figure")
        title = text(self.title)
        return Html(
            f'<figure><h3>{title}</h3><div class="chart" tabindex="0" role="group" '
            f'aria-label="Chart: {title}. {text(self.sentence)}"></div>{figure}'
            f"<figcaption>{paragraph(self.sentence)}"
            + details(
                f"Numbers of “{self.title}”",
                table(self.title, self.header, self.rows),
            )
            + "</figcaption></figure>"
        )


def label(value: object, longest: int = 60) -> str:
    """A text as Plotly shows it: escaped, and not longer than a legend is wide."""
    name = str(value)
    return text(name if len(name) <= longest else f"…{name[1 - longest :]}")


def axis(title: str, **options: Any) -> dict[str, Any]:
    """An axis with a title."""
    return {"title": {"text": label(title)}, **options}


def number(value: float | None) -> str:
    """A number of a table, to four digits.

    Example:
      >>> number(1234567.0), number(0.000123456), number(12), number(None)
      ('1.235e+06', '0.0001235', '12', '–')
    """
    return "–" if value is None else f"{value:.4g}"


def counted(number: int, what: str) -> str:
    """A number of things, of which one has no plural.

    Example:
      >>> counted(1, "step"), counted(1200, "step")
      ('1 step', '1,200 steps')
    """
    return f"{number:,} {what}" + ("s" if number != 1 else "")


def line_chart(
    title: str, unit: str, curves: Mapping[str, Series], *, log: bool = False
) -> Chart:
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
        rows.append(
            (
                name,
                len(steps),
                number(values[-1]),
                steps[-1],
                number(low[0]),
                low[1],
                number(high[0]),
                high[1],
            )
        )
    longest = max(map(len, curves.values()))
    if longest > MOST_POINTS:
        words.append(f"Drawn are the lowest and highest of groups of {longest:,} steps")
    layout = {
        "xaxis": axis("step"),
        "yaxis": axis(unit, type="log" if log else "linear"),
        "showlegend": len(curves) > 1,
        "hovermode": "x unified",
    }
    header = ("curve", "points", "last", "at step", "lowest", "at", "highest", "at")
    return Chart(title, ". ".join(words) + ".", traces, layout, header, rows)


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


def bar_chart(
    title: str,
    unit: str,
    bars: Mapping[str, Mapping[str, float]],
    sentence: str,
    shown: Mapping[str, Sequence[object]] | None = None,
    header: Sequence[object] = (),
) -> Chart:
    """Horizontal bars of parts that add up.

    Args:
      title: What is drawn.
      unit: The title of the horizontal axis.
      bars: The parts of each bar.
      sentence: What the chart shows.
      shown: Rows of the table, by their first cell; None shows the parts.
      header: The columns of that table.
    """
    parts = dict.fromkeys(part for values in bars.values() for part in values)
    names = [label(name, 40) for name in bars]
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": label(part),
            "y": names,
            "x": [values.get(part, 0.0) for values in bars.values()],
        }
        for part in parts
    ]
    layout = {
        "barmode": "stack",
        "xaxis": axis(unit),
        "yaxis": axis("", autorange="reversed", type="category"),
        "height": 200 + 36 * len(bars),
        "showlegend": True,
    }
    if shown is None:
        header = ("part", *bars)
        shown = {
            part: [number(values.get(part, 0.0)) for values in bars.values()]
            for part in parts
        }
    rows = [(first, *others) for first, others in shown.items()]
    return Chart(title, sentence, traces, layout, header, rows)
