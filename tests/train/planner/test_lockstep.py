# SPDX-License-Identifier: Apache-2.0
"""The ticks of named schedules are those of their tables."""

import numpy as np
import pytest

from tessera.errors import PipelineSizeError
from tessera.graph.pipelining import schedule
from tessera.graph.pipelining.named_schedules import NAMES
from tessera.train.planner.lockstep import Lockstep, is_simple

SIZES = [(stages, count) for stages in (1, 2, 3, 5) for count in (1, 2, 3, 6, 10)]


def seconds_by_table(table, forward, backward):
    prices = {"F": forward, "B": backward}
    if table.splits_backward:
        prices["B"] = prices["W"] = (backward + forward) / 2
    costs = [(table.table(kind)[..., 0] >= 0) * prices[kind] for kind in prices]
    return np.sum(costs, axis=0).max(axis=1).sum() / table.chunks


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_all_ticks_take_as_long_as_by_the_table(name, chunks):
    random = np.random.default_rng(0)
    for stages, count in SIZES:
        try:
            table = schedule(name, stages, count, chunks)
        except PipelineSizeError:
            assert not is_simple(name, chunks, stages, count)
            continue
        ticks = Lockstep.of(name, stages, count, chunks)
        times = random.random(stages), random.random(stages)
        assert ticks.seconds(*times, recomputes=True) == seconds_by_table(table, *times)
        assert ticks.ticks == table.ticks


def test_the_gradient_of_weights_begins_with_a_forward_only_where_stages_recompute():
    ones = np.ones(2)
    ticks = Lockstep.of("zero_bubble", 2, 4, 1)
    again = ticks.seconds(ones, 3 * ones, recomputes=True)
    stored = ticks.seconds(ones, 2 * ones, recomputes=False)
    # Six ticks, two without a forward or a backward of the slowest, and four of W.
    assert (stored, again) == (5 * 1 + 5 * 1 + 4 * 1, 5 * 1 + 5 * 2 + 4 * 2)


def test_dualpipev_ends_on_the_first_device_and_is_priced_by_its_table():
    ticks = Lockstep.of("dualpipev", 4, 16, 2)
    assert ticks.end == 0
    assert Lockstep.of("interleaved", 4, 16, 2).end == -1
    ones = np.ones(4)
    # F = 1 and B = W = 1: the work of a device, and a bubble of three.
    assert ticks.seconds(ones, 2 * ones, recomputes=False) == 3 * 16 + 3


def test_other_schedules_are_read_from_their_tables(monkeypatch):
    monkeypatch.setattr("tessera.train.planner.lockstep.IN_RUNS", ())
    times = np.array([1.0, 2.0]), np.array([2.0, 5.0])
    table = schedule("zero_bubble", 2, 4)
    found = Lockstep.of("zero_bubble", 2, 4, 1)
    assert found.seconds(*times, recomputes=True) == seconds_by_table(table, *times)
