# SPDX-License-Identifier: Apache-2.0
"""The sections of curves over steps: what was learned, and how fast."""

from collections.abc import Sequence
from typing import Final

from tessera.train.report.charts import line_chart
from tessera.train.report.markup import Html, join, paragraph
from tessera.train.report.run_files import RunFiles, Series

# Title, unit, and the metrics of a chart, which may be of validation as well; a name
# that ends with a slash stands for all that begin with it.
_REWARDS: Final = (
    ("Reward", "reward", "reward"),
    ("Reward by function", "reward", "reward/"),
    ("Standard deviation of the rewards", "reward", "reward_std"),
    ("Missing rewards", "share of completions", "reward_missing"),
    ("Groups without variance", "share of groups", "groups_without_variance"),
    ("Cut completions", "share of completions", "truncated_fraction"),
    ("Length of completions", "tokens", "completion_length"),
    ("KL to the reference", "nats per token", "kl"),
    ("Clipped", "share of tokens", "clip_low_fraction", "clip_high_fraction"),
    ("Largest ratio", "new over old probability", "ratio_max"),
    ("Entropy", "nats per token", "entropy"),
    ("Mismatch of sampler and trainer", "nats per token", "sampler_mismatch"),
    ("Rewards of answers", "reward", "chosen_reward", "rejected_reward"),
    ("Reward margin", "reward", "reward_margin"),
    ("Accuracy", "share of pairs", "accuracy"),
)
_ROLLOUTS: Final = (
    ("Rollouts", "tokens per second", "rollout_tokens_per_second"),
    ("Time of rollouts", "seconds", "rollout_seconds", "reward_seconds"),
)


def rewards(runs: Sequence[RunFiles]) -> Html:
    """What runs with preferences or rewards measured; nothing for others."""
    return join(_charts(runs, _REWARDS))


def _charts(runs: Sequence[RunFiles], charts: Sequence[tuple[str, ...]]) -> list[Html]:
    """The charts of which there are curves."""
    return [
        line_chart(title, unit, curves)
        for title, unit, *metrics in charts
        if (curves := _named(runs, *metrics, *(f"val_{name}" for name in metrics)))
    ]


def learning(runs: Sequence[RunFiles]) -> Html:
    """Loss, validation loss, learning rate and gradient norms."""
    # The losses of pairs and of policies are of no such unit.
    objectives = [run.settings.get("training.objective") for run in runs]
    plain = all(objective in (None, "next_token") for objective in objectives)
    unit = "nats per token" if plain else "loss"
    charts = (
        ("Loss", unit, "loss"),
        ("Validation loss", unit, "val_loss"),
        ("Learning rate", "learning rate", "learning_rate"),
        ("Gradient norm", "norm", "grad_norm"),
    )
    parts = [_chart_or_sentence(runs, *chart) for chart in charts]
    if sources := _named(runs, "val_loss/"):
        parts.append(line_chart("Validation loss by source", unit, sources))
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
    return join(parts + _charts(runs, _ROLLOUTS))


def _seconds_waited(run: RunFiles) -> Series:
    """Seconds of each step in which the loop waited for a batch."""
    seconds = run.series.get("step_seconds", {})
    fractions = run.series.get("data_wait_fraction", {})
    return {s: seconds[s] * part for s, part in fractions.items() if s in seconds}


def _chart_or_sentence(
    runs: Sequence[RunFiles], title: str, unit: str, name: str
) -> Html:
    curves = _named(runs, name)
    if not curves:
        return paragraph(f"{title}: no step recorded it.")
    # The zeros of skipped steps have no logarithm.
    positive = all(v > 0 for curve in curves.values() for v in curve.values())
    log = name == "grad_norm" and positive
    return line_chart(title, unit, curves, log=log)


def _named(runs: Sequence[RunFiles], *metrics: str) -> dict[str, Series]:
    """The metrics that are wanted, by run, or by run and name where there are more."""
    found = {
        (run.name, name): series
        for run in runs
        for name, series in run.series.items()
        if series and "".join(name.partition("/")[:2]) in metrics
    }
    names = {name for _, name in found}
    several = len(names) > 1 or any("/" in name for name in names)
    return {
        f"{run}: {name.removeprefix('val_loss/')}" if several else run: series
        for (run, name), series in found.items()
    }
