# SPDX-License-Identifier: Apache-2.0
"""The numbers of a step as they are written and shown."""

import io

import pytest

from tessera.train.loop.console import Console
from tessera.train.loop.metrics import MetricWriter
from tessera.train.loop.run_records import RunRecords
from tessera.train.loop.step_metrics import StepMetrics
from tests.train.loop.short_runs import run_of, settings_of


def taken(tokens):
    """What a step of 4 sequences of 16 tokens writes and shows."""
    lines, seen, writer = [], io.StringIO(), MetricWriter(None)
    writer.write = lambda step, numbers: lines.append(numbers)
    metrics = StepMetrics(run_of(settings_of()), writer, None, RunRecords())
    numbers = {"loss": 1.0, "grad_norm": 1.0, "learning_rate": 0.1, "tokens": tokens}
    with (
        Console(None, stream=seen, terminal=False) as console,
        console.progress(12) as progress,
    ):
        metrics.take(1, numbers, progress)
    return lines[0], seen.getvalue()


def test_a_step_says_which_part_of_its_tokens_has_a_loss():
    numbers, seen = taken(16.0)
    assert numbers["learned_fraction"] == 0.25
    assert numbers["tokens_per_second"] * numbers["step_seconds"] == pytest.approx(64)
    assert "  learned_fraction 0.25" in seen


def test_a_step_of_text_learns_all_of_it_and_says_nothing():
    numbers, seen = taken(64.0)
    assert "learned_fraction" not in numbers
    assert "learned" not in seen
