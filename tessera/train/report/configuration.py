# SPDX-License-Identifier: Apache-2.0
"""The compiled step, the settings of runs, and where they ran."""

from collections.abc import Sequence
from typing import Any, Final

import yaml

from tessera.train.report.markup import (
    Html,
    columns_table,
    details,
    join,
    paragraph,
    table,
)
from tessera.train.report.run_files import RunFiles

_MISSING: Final = "(none)"


def compiled_step(runs: Sequence[RunFiles]) -> Html:
    """What the log says of each compiled step, and the measured peak of memory."""
    figures = {run.name: _of_step(run) for run in runs}
    if not any(figures.values()):
        return paragraph("No compiled step was recorded.")
    return columns_table("The compiled step", figures)


def _of_step(run: RunFiles) -> dict[str, str]:
    """The table of the last attempt."""
    figures = run.program("rows")
    if peaks := run.series.get("peak_memory_bytes"):
        figures["measured peak of memory"] = f"{max(peaks.values()) / 2**30:.4g} GiB"
    return figures


def settings(runs: Sequence[RunFiles]) -> Html:
    """Every setting; where runs differ, the setting is marked and comes first."""
    known = [run for run in runs if run.settings]
    if not known:
        return paragraph("There is no config.yaml that could be read.")
    names = dict.fromkeys(name for run in known for name in run.settings)
    rows = {name: [_value(run, name) for run in known] for name in names}
    differ = differing(known)
    header = ("setting", *(run.name for run in known))
    parts: list[Html] = []
    if len(known) > 1 and differ:
        parts.append(paragraph(f"The runs differ in {len(differ)} settings."))
        changed = [(name, *rows[name]) for name in differ]
        parts.append(table("Settings that differ", header, changed, range(len(differ))))
    elif len(known) > 1:
        parts.append(paragraph("The runs have the same settings."))
    every = [(name, *values) for name, values in rows.items()]
    marks = [number for number, name in enumerate(rows) if name in differ]
    parts.append(details("All settings", table("All settings", header, every, marks)))
    return join(parts)


def differing(runs: Sequence[RunFiles]) -> list[str]:
    """The settings that are not the same in all runs.

    Args:
      runs: Compared by what ``config.yaml`` says: ``1`` and ``"1"`` differ.
    """
    names = dict.fromkeys(name for run in runs for name in run.settings)
    return [name for name in names if len({_value(run, name) for run in runs}) > 1]


def environment(runs: Sequence[RunFiles]) -> Html:
    """Versions, devices and host of each attempt."""
    attempts = [
        (run.name, event.get("attempt", 0), _of_attempt(event))
        for run in runs
        for event in run.of_kind("start")
    ]
    columns = dict.fromkeys(name for *_, values in attempts for name in values)
    rows = [
        (name, attempt, *(values.get(column, "–") for column in columns))
        for name, attempt, values in attempts
    ]
    if not rows:
        return paragraph("No start was recorded, so that the machine is unknown.")
    return table("Attempts", ("run", "attempt", *columns), rows)


def _of_attempt(event: Any) -> dict[str, object]:
    names = ("num_devices", "device_kind", "num_processes", "host")
    values: dict[str, object] = {n: event[n] for n in names if n in event}
    return values | dict(event.get("versions") or {})


def _value(run: RunFiles, name: str) -> str:
    """A setting as one would write it, so that text and numbers stay apart."""
    if name not in run.settings:
        return _MISSING
    value = run.settings[name]
    written = yaml.safe_dump(value, default_flow_style=True, width=10**6)
    return written.removesuffix("\n").removesuffix("...").rstrip("\n")
