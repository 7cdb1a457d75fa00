# SPDX-License-Identifier: Apache-2.0
"""What failures cost, against runs whose failures are drawn."""

import numpy as np
import pytest

from tessera.train.planner.goodput import goodput, seconds_between, spare_hosts

DAY = 24 * 3600


def simulated(between, wait, write, restart, interval, failures=20_000):
    """The goodput of a long run, failure by failure."""
    random = np.random.default_rng(0)
    total = useful = 0.0
    for gap in random.exponential(between, failures):
        total += gap
        if gap < restart:
            continue
        time = gap - restart
        saved, rest = divmod(time, interval + wait)
        # The newest checkpoint of this attempt whose files are complete.
        complete = saved if rest + wait >= write else saved - 1
        useful += max(complete, 0.0) * interval
    return useful / total


@pytest.mark.parametrize(
    ("between", "wait", "write", "restart"),
    [
        (11_124, 1.0, 30.0, 300.0),
        (5_562, 5.0, 60.0, 600.0),
        (1_816, 0.5, 3.0, 300.0),
        (1_816, 20.0, 20.0, 120.0),
    ],
)
def test_the_formula_is_what_drawn_failures_give(between, wait, write, restart):
    found = goodput(between, wait, write, restart)
    drawn = simulated(between, wait, write, restart, found.interval)
    assert found.share == pytest.approx(drawn, rel=0.02)


def test_no_other_interval_loses_less():
    settings = {"between": 1_816, "wait": 5.0, "write": 5.0, "restart": 300.0}
    best = goodput(**settings)
    for factor in (0.5, 0.8, 1.25, 2):
        drawn = simulated(**settings, interval=factor * best.interval)
        assert drawn < best.share * 1.003


def test_the_rate_of_llama_3_is_one_failure_in_three_hours():
    assert seconds_between(16_384) == pytest.approx(54 * DAY / 419)


def test_spare_hosts_are_enough_in_99_of_100_draws():
    between = seconds_between(100_352)
    spares = spare_hosts(between, DAY)
    out = np.random.default_rng(0).poisson(DAY / between, 100_000)
    assert np.mean(out <= spares) >= 0.99
    assert np.mean(out <= spares - 1) < 0.99
