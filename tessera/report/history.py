# SPDX-License-Identifier: Apache-2.0
"""The sections of a run's history: goodput, events on a time axis, slow ranks."""

import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from statistics import fmean, median
from typing import Final

from tessera.records.events import Event
from tessera.records.goodput import goodput_of
from tessera.report.charts import Chart, axis, bar_chart, label, line_chart, number
from tessera.report.markup import Section, join, paragraph
from tessera.report.run_files import RunFiles, Series

_MOST_RANKS: Final = 16
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


def ranks(runs: Sequence[RunFiles]) -> Section:
    """What a step takes each rank by itself: its host, and its devices."""
    parts = [
        chart.as_html()
        for title, field in (
            ("Own time of a step on each rank", "seconds"),
            ("Device time of a step on each rank", "device_seconds"),
        )
        if (chart := _rank_chart(runs, title, field)) is not None
    ]
    if not parts:
        sentence = "No times by rank were recorded: several processes record them."
        parts = [paragraph(sentence)]
    return Section("ranks", "Ranks", join(parts))


def _rank_chart(runs: Sequence[RunFiles], title: str, field: str) -> Chart | None:
    """The times of each rank; of many ranks those of the slowest."""
    curves: dict[str, Series] = {}
    words: list[str] = []
    for run in runs:
        by_rank = _seconds_by_rank(run, field)
        # Devices that are not measured, as those of a CPU, took no time.
        if not any(any(series.values()) for series in by_rank.values()):
            continue
        means = {rank: fmean(series.values()) for rank, series in by_rank.items()}
        slowest = max(means, key=means.__getitem__)
        words.append(
            f"{run.name}: rank {slowest} is the slowest of {len(means)}, with "
            f"{number(means[slowest])} seconds a step, where the median is "
            f"{number(median(means.values()))}"
        )
        chosen = sorted(means, key=means.__getitem__)[-_MOST_RANKS:]
        of_run = f"{run.name}: " if len(runs) > 1 else ""
        curves |= {f"{of_run}rank {rank}": by_rank[rank] for rank in chosen}
        if len(means) > len(chosen):
            words.append(f"Drawn are the {len(chosen)} slowest")
    if not curves:
        return None
    chart = line_chart(title, "seconds", curves)
    return replace(chart, sentence=". ".join(words) + ".")


def _seconds_by_rank(run: RunFiles, field: str) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for event in run.of_kind("ranks"):
        for rank, seconds in (event.get(field) or {}).items():
            found.setdefault(rank, {})[event["step"]] = float(seconds)
    return {rank: dict(sorted(series.items())) for rank, series in found.items()}
