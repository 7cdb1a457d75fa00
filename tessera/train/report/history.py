# SPDX-License-Identifier: Apache-2.0
"""The sections of a run's history: goodput, and events by their time."""

import re
from collections.abc import Sequence
from typing import Final

from tessera.train.records.events import Event
from tessera.train.records.goodput import CAUSES, STEP_PARTS, goodput_of
from tessera.train.report.charts import number, utc
from tessera.train.report.markup import Html, join, paragraph, table
from tessera.train.report.run_files import RunFiles

_MOST_SHOWN: Final = 2000
_LONGEST_MESSAGE: Final = 1000
# A warning about a checkpoint that could not be used, as its errors word it.
_DAMAGED: Final = re.compile(r"THE CHECKPOINT OF STEP \d+ IS DAMAGED")
_KINDS: Final = (
    "start",
    "resume",
    "warning",
    "damaged checkpoint",
    "stop",
    "failure",
    "end",
)


def goodput(runs: Sequence[RunFiles]) -> Html:
    """Where the wall time of each run went."""
    by_run = {run.name: goodput_of(run.events) for run in runs if run.events}
    known = {name: each for name, each in by_run.items() if each.total_seconds > 0}
    if not known:
        return paragraph("No times were recorded, so that the goodput is unknown.")
    rows: list[tuple[object, ...]] = [
        ("all", *(f"{number(each.total_seconds)} s" for each in known.values()))
    ]
    times = [{**each.parts, **each.seconds} for each in known.values()]
    totals = [each.total_seconds for each in known.values()]
    for name in dict.fromkeys(("step", *STEP_PARTS, *CAUSES)):
        if any(each[name] for each in times):
            shares = (
                f"{number(each[name])} s, {each[name] / total:.1%}"
                for each, total in zip(times, totals, strict=True)
            )
            rows.append((name if name in CAUSES else f"{name}, of step", *shares))
    caption = "Wall time by cause: step is what went into steps that counted"
    return table(caption, ("cause", *known), rows)


def events(runs: Sequence[RunFiles]) -> Html:
    """Every start, resume, stop, failure and warning, by its time."""
    found = [
        (run.name, kind, event)
        for run in runs
        for event in run.events
        if (kind := _kind(event)) is not None
    ]
    if not found:
        return paragraph("No events were recorded.")
    found.sort(key=lambda item: item[2]["time"])
    shown = found[-_MOST_SHOWN:]
    counts = {kind: sum(item[1] == kind for item in found) for kind in _KINDS}
    listed = ", ".join(f"{count} × {kind}" for kind, count in counts.items() if count)
    first, last = (utc(found[at][2]["time"]) for at in (0, -1))
    sentence = f"From {first} to {last} UTC: {listed}."
    if len(found) > len(shown):
        sentence += f" Shown are the last {len(shown):,}."
    rows = [
        (utc(event["time"]), name, event.get("attempt", ""), kind, _message(event))
        for name, kind, event in shown
    ]
    header = ("time, UTC", "run", "attempt", "event", "message")
    return join((paragraph(sentence), table("Events", header, rows)))


def _kind(event: Event) -> str | None:
    """What an event is called in the table; None is not shown."""
    kind = str(event["event"])
    if kind == "start" and (event.get("resumed_step") or event.get("attempt")):
        return "resume"
    if kind == "warning" and _DAMAGED.search(str(event.get("message"))):
        return "damaged checkpoint"
    return kind if kind in _KINDS else None


def _message(event: Event) -> str:
    if event["event"] == "start":
        step = event.get("resumed_step")
        begin = "anew" if step is None else f"after step {step}"
        devices = f"{event.get('num_devices', '?')} × {event.get('device_kind', '?')}"
        return f"attempt {event.get('attempt', 0)} begins {begin} on {devices}"
    parts = [str(event[name]) for name in ("message", "reason") if event.get(name)]
    if event.get("step") is not None:
        parts.insert(0, f"step {event['step']}")
    return ": ".join(parts)[:_LONGEST_MESSAGE]
