# SPDX-License-Identifier: Apache-2.0
"""The first section: how each run ended, what it was, and its main numbers."""

from collections.abc import Sequence
from math import isfinite
from statistics import median

from tessera.train.records.goodput import goodput_of
from tessera.train.report.charts import counted, number, utc
from tessera.train.report.markup import Html, columns_table, join, paragraph
from tessera.train.report.run_files import RunFiles, Series

_LONGEST_MESSAGE = 500
# What runs with rewards or preferences have, and others do not show.
_REWARDS = ("reward", "val_reward", "reward_margin", "accuracy", "val_accuracy")


def summary(runs: Sequence[RunFiles]) -> Html:
    """A verdict on each run, and tables of all."""
    parts = [paragraph(f"{run.name}: {verdict(run)}", "verdict") for run in runs]
    for caption, column in (
        ("Main numbers", _numbers),
        ("What was run", _what_was_run),
    ):
        parts.append(columns_table(caption, {run.name: column(run) for run in runs}))
    parts += [
        paragraph(f"{run.name}: could not be read in full. {problem}", "warning")
        for run in runs
        for problem in run.problems
    ]
    return join(parts)


def verdict(run: RunFiles) -> str:
    """How a run ended, or how far it is, in a sentence or a few."""
    words = [_ending(run)]
    if loss := run.series.get("loss"):
        step, value = [*loss.items()][-1]
        words.append(f"Loss {number(value)} at step {step:,}.")
    if reward := run.series.get("reward"):
        words.append(f"Reward {_last(reward)} at step {max(reward):,}.")
    validation = run.series.get("val_loss", {})
    if finite := {s: v for s, v in validation.items() if isfinite(v)}:
        best = min(finite, key=finite.__getitem__)
        words.append(
            f"Lowest validation loss {number(finite[best])} after step {best:,}."
        )
    if bad := sum(not isfinite(value) for value in run.series.get("loss", {}).values()):
        words.append(f"The loss is not finite at {counted(bad, 'step')}.")
    if skipped := round(sum(run.series.get("skipped", {}).values())):
        words.append(f"Skipped: {counted(skipped, 'step')}.")
    if warnings := len(run.of_kind("warning")):
        words.append(f"{counted(warnings, 'warning')}.")
    return " ".join(words)


def _ending(run: RunFiles) -> str:
    ends = ("start", "end", "stop", "failure")
    events = [event for event in run.events if event["event"] in ends]
    steps = run.settings.get("training.steps")
    of = f" of {steps:,}" if isinstance(steps, int) else f" of {steps}" if steps else ""
    done = max(run.series.get("loss", {}), default=0)
    if not events:
        return f"No events say how it ended; {done:,}{of} steps are recorded."
    last = events[-1]
    if last["event"] == "end":
        return f"Finished: {number(last.get('step', done))}{of} steps."
    if last["event"] == "stop":
        step = number(last.get("step", done))
        return f"Stopped after step {step}{of}, to go on later."
    if last["event"] == "failure":
        message = str(last.get("message", "no message"))[:_LONGEST_MESSAGE]
        return f"Failed after step {done:,}{of}: {message}"
    moment = max(event["time"] for event in run.events)
    seen = utc(moment)
    return f"Going on, or killed: {done:,}{of} steps, last heard of at {seen} UTC."


def _what_was_run(run: RunFiles) -> dict[str, str]:
    """Model, data and all that the log says at the start of a run."""
    names = {
        "model": "model.name",
        "data": "data.name",
        "path of the data": "data.path",
    }
    # Of a run that an earlier version wrote, or that did not get that far.
    known = {name: str(run.settings.get(path) or "") for name, path in names.items()}
    return run.program("run") or {name: value for name, value in known.items() if value}


def _numbers(run: RunFiles) -> dict[str, str]:
    """The main numbers of a run, all of them, so that runs share their rows."""
    series = run.series
    starts = run.of_kind("start")
    where = starts[-1] if starts else {}
    shares = goodput_of(run.events).shares
    is_timed = any(shares.values())
    return {
        "steps": f"{max(series.get('loss', {}), default=0):,}",
        "loss": _last(series.get("loss", {})),
        "validation loss": _last(series.get("val_loss", {})),
        **{name: _last(series[name]) for name in _REWARDS if name in series},
        "tokens/s, median": _median(series.get("tokens_per_second", {})),
        "seconds/step, median": _median(series.get("step_seconds", {})),
        "MFU, median": _median(series.get("mfu", {})),
        "goodput": f"{shares['step']:.1%}" if is_timed else "–",
        "attempts": str(len(starts) or "–"),
        "devices": f"{where['num_devices']} × {where.get('device_kind', '?')}"
        if "num_devices" in where
        else "–",
    }


def _last(series: Series) -> str:
    return number([*series.values()][-1]) if series else "–"


def _median(series: Series) -> str:
    finite = [value for value in series.values() if isfinite(value)]
    return number(median(finite)) if finite else "–"
