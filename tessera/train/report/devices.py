# SPDX-License-Identifier: Apache-2.0
"""The sections of the compiled step: memory, mesh and pipeline."""

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from typing import Final

from tessera.train.report.charts import number
from tessera.train.report.markup import Html, join, paragraph, table, text
from tessera.train.report.run_files import RunFiles

_MOST_DEVICES: Final = 512


def memory(runs: Sequence[RunFiles]) -> Html:
    """What the compiled step takes of a device, the measured peak, what there is."""
    figures = {run.name: _memory_figures(run) for run in runs}
    names = dict.fromkeys(name for each in figures.values() for name in each)
    if not names:
        return paragraph("No memory was recorded.")
    rows = [
        (name, *(_size(each.get(name)) for each in figures.values())) for name in names
    ]
    return table("Memory of each device", ("", *figures), rows)


def _memory_figures(run: RunFiles) -> dict[str, float]:
    """Bytes by what they are; nothing unless a step was compiled or measured."""
    planned = run.program.get("memory") or {}
    measured = max(run.series.get("peak_memory_bytes", {}).values(), default=None)
    figures = {"measured peak": measured}
    if planned:
        figures |= {
            "compiled step": planned["peak"],
            "of it, state and batch": planned["arguments"],
            "of it, results": planned["outputs"] - planned["aliased"],
            "of it, temporaries": planned["temporaries"],
            "of it, code": planned["code"],
        }
    if planned or measured is not None:
        figures |= run.program.get("state_bytes") or {}
        figures["memory of a device"] = run.program.get("device_memory_bytes")
    return {name: size for name, size in figures.items() if size is not None}


def _size(size: float | None) -> str:
    if size is None:
        return "not known"
    unit, divisor = ("GiB", 2.0**30) if size >= 2**28 else ("MiB", 2.0**20)
    return f"{number(size / divisor)} {unit}"


def mesh(runs: Sequence[RunFiles]) -> Html:
    """The devices of each mesh, and what each of its axes sends in a step."""
    parts: list[Html] = []
    for run in runs:
        if axes := _axes(run):
            parts.append(_grid(run.name, axes, run.program.get("device_ids")))
        else:
            parts.append(paragraph(f"{run.name}: its mesh was not recorded."))
        rows = [
            (
                "×".join(sent["axes"]) or "no axis",
                sent["kind"],
                sent["calls"],
                f"{number(sent['bytes'] / 2**20)} MiB",
            )
            for sent in run.program.get("collectives") or ()
        ]
        if rows:
            title = f"{run.name}: sent by each device in a step"
            parts.append(table(title, ("axes", "kind", "calls", "size"), rows))
        elif run.program:
            parts.append(paragraph(f"{run.name}: a step sends nothing."))
        else:
            parts.append(paragraph("What the axes send was not recorded."))
    return join(parts)


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


def pipeline(runs: Sequence[RunFiles]) -> Html:
    """The schedule of each pipeline, a row for each device."""
    parts = [
        join(
            (
                paragraph(f"{run.name}: {found['summary']}"),
                Html(f'<pre class="pipeline">{text(found.get("table", ""))}</pre>'),
            )
        )
        for run in runs
        if (found := run.program.get("pipeline"))
    ]
    if not parts:
        return paragraph("There is no pipeline: no mesh has an axis pp.")
    return join(parts)
