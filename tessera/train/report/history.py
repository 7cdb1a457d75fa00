# SPDX-License-Identifier: Apache-2.0
"""The sections of a run's history: goodput, and events on a time axis."""

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from tessera.train.records.events import Event
from tessera.train.records.goodput import goodput_of
from tessera.train.report.charts import Chart, axis, bar_chart, label, number
from tessera.train.report.markup import Section, paragraph
from tessera.train.report.run_files import RunFiles

_MOST_SHOWN: Final = 2000
_LONGEST_MESSAGE: Final = 1000
# A warning about a checkpoint that could not be used, as its errors word it.
_DAMAGED: Final = re.compile(r"THE CHECKPOINT OF STEP \d+ IS DAMAGED")
_SYMBOLS: Final = {
    "start": "circle",
    "resume": "triangle-right",
    "rollback": "triangle-left",
    "warning": "diamond",
    "damaged checkpoint": "x",
    "stop": "square",
    "failure": "cross",
    "end": "star",
}


def goodput(runs: Sequence[RunFiles]) -> Section:
    """Where the wall time of each run went."""
    by_run = {run.name: goodput_of(run.events) for run in runs if run.events}
    known = {name: each for name, each in by_run.items() if each.total_seconds > 0}
    if not known:
        sentence = "No times were recorded, so that the goodput is unknown."
        return Section("goodput", "Goodput", paragraph(sentence))
    words = [
        f"{name}: {each.shares['step']:.1%} of {number(each.total_seconds)} seconds "
        "went into steps that counted"
        for name, each in known.items()
    ]
    bars = {
        name: {cause: seconds for cause, seconds in each.seconds.items() if seconds}
        for name, each in known.items()
    }
    causes = dict.fromkeys(cause for each in bars.values() for cause in each)
    rows = {
        cause: [
            f"{number(each.seconds[cause])} s, {each.shares[cause]:.1%}"
            for each in known.values()
        ]
        for cause in causes
    }
    sentence = ". ".join(words) + "."
    header = ("cause", *known)
    chart = bar_chart("Wall time by cause", "seconds", bars, sentence, rows, header)
    return Section("goodput", "Goodput", chart.as_html())


def events(runs: Sequence[RunFiles]) -> Section:
    """Every start, resume, stop, failure and warning on a time axis."""
    found = [
        (run.name, kind, event)
        for run in runs
        for event in run.events
        if (kind := _kind(event)) is not None
    ]
    title = "Starts, stops and warnings"
    if not found:
        return Section("events", title, paragraph("No events were recorded."))
    found.sort(key=lambda item: item[2]["time"])
    shown = found[-_MOST_SHOWN:]
    several = len(runs) > 1
    traces = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": kind,
            "x": [_time(event) for _, _, event in of_kind],
            "y": [
                label(f"{kind}: {name}" if several else kind) for name, *_ in of_kind
            ],
            "text": [label(_message(event), 200) for _, _, event in of_kind],
            "marker": {"symbol": symbol, "size": 11},
        }
        for kind, symbol in _SYMBOLS.items()
        if (of_kind := [item for item in shown if item[1] == kind])
    ]
    counts = {kind: sum(item[1] == kind for item in found) for kind in _SYMBOLS}
    listed = ", ".join(f"{count} × {kind}" for kind, count in counts.items() if count)
    sentence = f"From {_time(found[0][2])} to {_time(found[-1][2])} UTC: {listed}."
    if len(found) > len(shown):
        sentence += f" Shown are the last {len(shown):,}."
    layout = {
        "xaxis": axis("time, UTC", type="date"),
        "yaxis": axis("", type="category"),
        "showlegend": False,
    }
    rows = [
        (_time(event), name, event.get("attempt", ""), kind, _message(event))
        for name, kind, event in shown
    ]
    header = ("time, UTC", "run", "attempt", "event", "message")
    chart = Chart(title, sentence, traces, layout, header, rows)
    return Section("events", title, chart.as_html())


def _kind(event: Event) -> str | None:
    """What an event is on the time axis; None is not shown."""
    kind = str(event["event"])
    if kind == "start" and (event.get("resumed_step") or event.get("attempt")):
        return "resume"
    if kind == "warning" and _DAMAGED.search(str(event.get("message"))):
        return "damaged checkpoint"
    return kind if kind in _SYMBOLS else None


def _message(event: Event) -> str:
    if event["event"] == "start":
        step = event.get("resumed_step")
        begin = "anew" if step is None else f"after step {step}"
        devices = f"{event.get('num_devices', '?')} × {event.get('device_kind', '?')}"
        return f"attempt {event.get('attempt', 0)} begins {begin} on {devices}"
    parts = [str(event[name]) for name in ("message", "reason") if event.get(name)]
    if event.get("step") is not None:
        parts.insert(0, f"step {event['step']}")
    if event.get("to_step") is not None:
        parts.append(f"back to step {event['to_step']}")
    return ": ".join(parts)[:_LONGEST_MESSAGE]


def _time(event: Event) -> str:
    try:
        moment = datetime.fromtimestamp(event["time"], UTC)
    except (ValueError, OverflowError, OSError):
        return "1970-01-01 00:00:00"
    return f"{moment:%Y-%m-%d %H:%M:%S}"
