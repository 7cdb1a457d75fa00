# SPDX-License-Identifier: Apache-2.0
"""A curve with fewer points has the same first, last, lowest and highest values."""

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.train.report.charts import downsample


def test_a_short_curve_stays_as_it_is():
    assert downsample([1, 5, 9], [3.0, 1.0, 2.0]) == ([1, 5, 9], [3.0, 1.0, 2.0])


@pytest.mark.parametrize("spike", [1, 4_999, 50_000, 99_998])
def test_a_spike_of_one_step_stays_at_its_step(spike):
    values = [1.0] * 100_000
    values[spike] = 7.0
    steps, shown = downsample(range(100_000), values, most=100)
    assert len(steps) <= 100
    assert shown[steps.index(spike)] == 7.0


@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_a_value_that_is_not_finite_is_a_gap_at_its_step(bad):
    values = [1.0] * 10_000
    values[5_000] = bad
    steps, shown = downsample(range(10_000), values, most=50)
    assert shown[steps.index(5_000)] is None
    assert shown.count(None) == 1


@given(st.lists(st.floats(allow_nan=False, width=32), min_size=1), st.integers(4, 20))
def test_extremes_and_ends_stay_and_points_are_few(values, most):
    steps, shown = downsample(range(len(values)), values, most)
    finite = [value for value in values if abs(value) != inf]
    left = [value for value in shown if value is not None]
    assert len(left) <= most
    assert steps == sorted(set(steps))
    assert (steps[0], steps[-1]) == (0, len(values) - 1)
    assert (not finite and not left) or (max(left), min(left)) == (
        max(finite),
        min(finite),
    )
