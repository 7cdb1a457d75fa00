# SPDX-License-Identifier: Apache-2.0
"""The sections of curves over steps: what was learned, and how fast."""

from collections.abc import Callable, Sequence

from tessera.train.report.charts import line_chart
from tessera.train.report.markup import Html, join, paragraph
from tessera.train.report.run_files import RunFiles, Series


def learning(runs: Sequence[RunFiles]) -> Html:
    """Loss, validation loss, learning rate and gradient norms."""
    charts = (
        ("Loss", "nats per token", "loss", False),
        ("Validation loss", "nats per token", "val_loss", False),
        ("Learning rate", "learning rate", "learning_rate", False),
        ("Gradient norm", "norm", "grad_norm", True),
    )
    parts = [
        _chart_or_sentence(runs, title, unit, name, log=log)
        for title, unit, name, log in charts
    ]
    sources = _named(runs, lambda name: name.startswith("val_loss/"))
    if sources:
        parts.append(line_chart("Validation loss by source", "nats per token", sources))
    return join(parts)


def speed(runs: Sequence[RunFiles]) -> Html:
    """Throughput, utilization, and the time of a step with its parts."""
    charts = (
        ("Throughput", "tokens per second", "tokens_per_second"),
        ("Model FLOP utilization", "share of the peak", "mfu"),
        ("Step time", "seconds", "step_seconds"),
    )
    parts = [_chart_or_sentence(runs, *chart) for chart in charts]
    waits = {
        run.name: waited
        for run in runs
        if (waited := _seconds_waited(run)) and any(waited.values())
    }
    if waits:
        parts.append(line_chart("Part of the step time: data", "seconds", waits))
    else:
        parts.append(paragraph("No time of a step went into waiting for data."))
    return join(parts)


def _seconds_waited(run: RunFiles) -> Series:
    """Seconds of each step in which the loop waited for a batch."""
    seconds = run.series.get("step_seconds", {})
    fractions = run.series.get("data_wait_fraction", {})
    return {s: seconds[s] * part for s, part in fractions.items() if s in seconds}


def _chart_or_sentence(
    runs: Sequence[RunFiles], title: str, unit: str, name: str, *, log: bool = False
) -> Html:
    curves = _named(runs, lambda found: found == name)
    if not curves:
        return paragraph(f"{title}: no step recorded it.")
    # The zeros of skipped steps have no logarithm.
    log = log and all(v > 0 for curve in curves.values() for v in curve.values())
    return line_chart(title, unit, curves, log=log)


def _named(
    runs: Sequence[RunFiles], is_wanted: Callable[[str], bool]
) -> dict[str, Series]:
    """The metrics that are wanted, by run, or by run and name where there are more."""
    found = {
        (run.name, name): series
        for run in runs
        for name, series in run.series.items()
        if is_wanted(name) and series
    }
    several = len({name for _, name in found}) > 1
    return {
        f"{run}: {name.partition('/')[2]}" if several else run: series
        for (run, name), series in found.items()
    }
