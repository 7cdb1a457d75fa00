# SPDX-License-Identifier: Apache-2.0
"""The sections of the compiled step: memory, mesh, pipeline and timeline."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any, Final

from tessera.analysis.tables import format_seconds
from tessera.train.report.charts import Chart, axis, bar_chart, label, number
from tessera.train.report.markup import (
    Html,
    Section,
    join,
    paragraph,
    table,
)
from tessera.train.report.run_files import RunFiles

_MOST_DEVICES: Final = 512
_MOST_TICKS: Final = 256
_MOST_EVENTS: Final = 2000


def memory(runs: Sequence[RunFiles]) -> Section:
    """Memory of a device by kind, the measured peak, and what a device has."""
    bars: dict[str, dict[str, float]] = {}
    rows: dict[str, list[object]] = {}
    words: list[str] = []
    unit, divisor = _unit(runs)
    for run in runs:
        planned = run.program.get("memory") or {}
        measured = max(run.series.get("peak_memory_bytes", {}).values(), default=None)
        capacity = run.program.get("device_memory_bytes")
        if planned:
            new = planned["outputs"] - planned["aliased"]
            bars[run.name] = {
                "state and batch": planned["arguments"] / divisor,
                "results": new / divisor,
                "temporaries": planned["temporaries"] / divisor,
                "code": planned["code"] / divisor,
            }
        if planned or measured is not None:
            peak = planned.get("peak")
            parts = run.program.get("state_bytes") or {}
            figures = {"compiled step": peak, "measured peak": measured, **parts}
            figures["memory of a device"] = capacity
            for name, size in figures.items():
                rows[f"{run.name}: {name}"] = [_size(size)]
            known = [
                text.format(_size(size))
                for text, size in (
                    ("the step needs {} on each device", peak),
                    ("at most {} was measured", measured),
                    ("a device has {}", capacity),
                )
                if size is not None
            ]
            words.append(f"{run.name}: {', '.join(known)}")
    if not rows:
        return Section("memory", "Memory", paragraph("No memory was recorded."))
    sentence = ". ".join(words) + "."
    if not bars:
        only = table("Memory of a device", ("what", "size"), _rows(rows))
        return Section("memory", "Memory", join((paragraph(sentence), only)))
    chart = bar_chart("Memory of each device", unit, bars, sentence, rows, ("", ""))
    lines = _capacity_lines(runs, bars, divisor)
    return Section(
        "memory",
        "Memory",
        Chart(
            chart.title,
            chart.sentence,
            [*chart.traces, *lines],
            chart.layout,
            ("what", "size"),
            chart.rows,
        ).as_html(),
    )


def _unit(runs: Sequence[RunFiles]) -> tuple[str, float]:
    """The unit of the chart, and its bytes: of small models GiB would be nothing."""
    peaks = ((run.program.get("memory") or {}).get("peak") or 0 for run in runs)
    return _unit_of(max(peaks))


def _unit_of(size: float) -> tuple[str, float]:
    return ("GiB", 2.0**30) if size >= 2**28 else ("MiB", 2.0**20)


def _capacity_lines(
    runs: Sequence[RunFiles], bars: Mapping[str, object], divisor: float
) -> Iterator[dict[str, Any]]:
    """Markers beside the bars: what a device has, and what was measured."""
    capacities = {run.name: run.program.get("device_memory_bytes") for run in runs}
    peaks = {
        run.name: max(run.series.get("peak_memory_bytes", {}).values(), default=None)
        for run in runs
    }
    for name, sizes in (("capacity", capacities), ("measured peak", peaks)):
        known = {run: size for run, size in sizes.items() if size and run in bars}
        if known:
            yield {
                "type": "scatter",
                "mode": "markers",
                "name": name,
                "marker": {"symbol": "line-ns-open", "size": 28, "line": {"width": 3}},
                "x": [size / divisor for size in known.values()],
                "y": [label(run, 40) for run in known],
            }


def _size(size: float | None) -> str:
    if size is None:
        return "not known"
    unit, divisor = _unit_of(size)
    return f"{number(size / divisor)} {unit}"


def _rows(rows: Mapping[str, Sequence[object]]) -> list[tuple[object, ...]]:
    return [(first, *others) for first, others in rows.items()]


def mesh(runs: Sequence[RunFiles]) -> Section:
    """The devices of each mesh, and what each of its axes sends in a step."""
    parts: list[Html] = []
    bars: dict[str, dict[str, float]] = {}
    rows: dict[str, list[object]] = {}
    for run in runs:
        axes = _axes(run)
        if not axes:
            parts.append(paragraph(f"{run.name}: its mesh was not recorded."))
            continue
        parts.append(_grid(run.name, axes, run.program.get("device_ids")))
        for sent in run.program.get("collectives") or ():
            over = "×".join(sent["axes"]) or "no axis"
            bar = bars.setdefault(f"{run.name}: {over}", {})
            kind = sent["kind"]
            bar[kind] = bar.get(kind, 0.0) + sent["bytes"] / 2**20
            rows[f"{run.name}: {over}, {kind}"] = [
                sent["calls"],
                f"{number(sent['bytes'] / 2**20)} MiB",
            ]
    if bars:
        total = sum(size for bar in bars.values() for size in bar.values())
        most = max(bars, key=lambda name: sum(bars[name].values()))
        sentence = (
            f"A device sends {number(total)} MiB in a step, most of it over {most}: "
            f"{number(sum(bars[most].values()))} MiB."
        )
        title = "Sent by each device in a step"
        header = ("axes and kind", "calls", "size")
        chart = bar_chart(title, "MiB", bars, sentence, rows, header)
        parts.append(chart.as_html())
    elif any(run.program for run in runs):
        parts.append(paragraph("The compiled step sends nothing between devices."))
    else:
        parts.append(paragraph("What the axes send was not recorded."))
    return Section("mesh", "Mesh and communication", join(parts))


def _axes(run: RunFiles) -> dict[str, int]:
    """The axes of the run's last attempt, or of the program that it compiled."""
    starts = run.of_kind("start")
    found = run.program.get("mesh") or (starts[-1].get("mesh") if starts else None)
    return dict(found or {})


def _grid(run: str, axes: Mapping[str, int], ids: Sequence[int] | None) -> Html:
    """A mesh as a grid of devices: the last axis to the right, the others down."""
    size = prod(axes.values())
    words = " × ".join(f"{each} {length}" for each, length in axes.items())
    title = f"{run}: mesh of {size} devices, {words}"
    if size > _MOST_DEVICES:
        return paragraph(f"{title}, too many to draw.")
    *outer, inner = axes
    names = ids or range(size)
    rows: list[list[object]] = []
    for row, at in enumerate(product(*(range(axes[name]) for name in outer))):
        first = row * axes[inner]
        where = ", ".join(f"{a} {i}" for a, i in zip(outer, at, strict=True))
        rows.append([where or "device", *names[first : first + axes[inner]]])
    header = ("", *(f"{inner} {i}" for i in range(axes[inner])))
    return Html(f'<div class="mesh">{table(title, header, rows)}</div>')


def pipeline(runs: Sequence[RunFiles]) -> Section:
    """The schedule of each pipeline, a row for each device."""
    parts: list[Html] = []
    for run in runs:
        if found := run.program.get("pipeline"):
            title = f"{run.name}: {found['summary']}"
            parts.append(paragraph(title))
            ticks = found["rows"][0][1 : _MOST_TICKS + 1]
            header = (found["rows"][0][0], *ticks)
            rows = [row[: _MOST_TICKS + 1] for row in found["rows"][1:]]
            drawn = table("F forward, B backward, W weights", header, rows)
            parts.append(Html(f'<div class="pipeline">{drawn}</div>'))
            if found.get("is_cut") or len(found["rows"][0]) > _MOST_TICKS + 1:
                parts.append(paragraph(f"Shown are the first {len(ticks)} ticks."))
    if not parts:
        parts = [paragraph("There is no pipeline: no mesh has an axis pp.")]
    return Section("pipeline", "Pipeline", join(parts))


def timeline(runs: Sequence[RunFiles]) -> Section:
    """What a device does in one step, as it was measured and as it was predicted."""
    parts = [
        chart.as_html()
        for title, field in (
            ("Measured timeline", "measured_timeline"),
            ("Predicted timeline", "timeline"),
        )
        for run in runs
        if (chart := _timeline_chart(run.name, getattr(run, field), title))
    ]
    if not parts:
        sentence = (
            "There is no timeline of a step: training.profile_communication=true "
            "measures one, and a dry run with runtime.target and runtime.timeline_dir, "
            "which may be the run's folder, predicts one."
        )
        parts = [paragraph(sentence)]
    return Section("timeline", "Timeline of one step", join(parts))


def _timeline_chart(run: str, trace: Mapping[str, Any], title: str) -> Chart | None:
    """The longest events of a trace, a row for each stream."""
    entries = trace.get("traceEvents") or ()
    names = {e["tid"]: e["args"]["name"] for e in entries if e["name"] == "thread_name"}
    events = [entry for entry in entries if entry.get("ph") == "X"]
    if not events:
        return None
    events.sort(key=lambda entry: -entry["dur"])
    shown = events[:_MOST_EVENTS]
    kinds = dict.fromkeys(entry.get("cat", "other") for entry in shown)
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": label(kind),
            "base": [e["ts"] / 1e3 for e in of_kind],
            "x": [e["dur"] / 1e3 for e in of_kind],
            "y": [label(names.get(e["tid"], e["tid"])) for e in of_kind],
            "text": [label(e["name"], 80) for e in of_kind],
            "textposition": "none",
        }
        for kind in kinds
        if (of_kind := [e for e in shown if e.get("cat", "other") == kind])
    ]
    end = max(entry["ts"] + entry["dur"] for entry in events)
    sentence = (
        f"{run}: a step of {format_seconds(end / 1e6)} in {len(events):,} events, "
        f"of which the longest, {shown[0]['name']}, takes "
        f"{format_seconds(shown[0]['dur'] / 1e6)}."
    )
    if len(events) > len(shown):
        sentence += f" Drawn are the {len(shown):,} longest."
    layout = {
        "barmode": "overlay",
        "xaxis": axis("milliseconds"),
        "yaxis": axis("", type="category"),
        "showlegend": True,
    }
    rows = [(e["name"], e.get("cat", ""), number(e["dur"] / 1e3)) for e in shown[:50]]
    header = ("the longest events", "kind", "milliseconds")
    return Chart(title, sentence, traces, layout, header, rows)
