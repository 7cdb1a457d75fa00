# SPDX-License-Identifier: Apache-2.0
"""Phases are recorded with their lengths, by a clock that nobody sets."""

from itertools import pairwise

import pytest

from tessera.train.records import phases
from tessera.train.records.phases import PhaseClock


class Time:
    """Both clocks, as a test sets them."""

    def __init__(self):
        self.now, self.wall = 100.0, 1000.0

    def monotonic(self):
        return self.now

    def time(self):
        return self.wall

    def pass_by(self, seconds):
        self.now += seconds
        self.wall += seconds


@pytest.fixture
def clock(monkeypatch):
    """A clock of a process that began at 990, and what it records."""
    set_time = Time()
    monkeypatch.setattr(phases, "time", set_time)
    monkeypatch.setattr(phases, "process_age", lambda pid: 10.0)
    recorded = []
    phase_clock = PhaseClock()
    return set_time, phase_clock, recorded, lambda _, **fields: recorded.append(fields)


def test_phases_before_there_is_a_file_are_recorded_once_there_is(clock):
    set_time, phase_clock, recorded, record = clock
    set_time.pass_by(1.0)
    phase_clock.enter("startup")
    set_time.pass_by(2.0)
    phase_clock.attach(record)
    assert recorded == [{"at": 990.0, "phase": "start", "seconds": 11.0}]
    phase_clock.enter("compile")
    assert recorded[1:] == [{"at": 1001.0, "phase": "startup", "seconds": 2.0}]
    assert phase_clock.process_start == 990.0


def test_steps_in_a_row_are_one_phase_in_parts(clock):
    set_time, phase_clock, recorded, record = clock
    phase_clock.attach(record)
    for step in range(1, 25):
        phase_clock.enter("step", step)
        phase_clock.add_data_wait(0.01)
        set_time.pass_by(0.1)
    phase_clock.enter("save", 24)
    steps = [each for each in recorded if each["phase"] == "step"]
    parts = [(each["first_step"], each["last_step"]) for each in steps]
    assert parts[0][0] == 1
    assert parts[-1][1] == 24
    assert all(end + 1 == begin for (_, end), (begin, _) in pairwise(parts))
    assert len(parts) > 1
    assert sum(each["seconds"] for each in steps) == pytest.approx(2.4)
    assert sum(each["data_seconds"] for each in steps) == pytest.approx(0.24)


def test_steps_that_do_not_follow_each_other_are_phases_of_their_own(clock):
    _, phase_clock, recorded, record = clock
    phase_clock.attach(record)
    for step in (1, 2, 3, 2, 3):
        phase_clock.enter("step", step)
    phase_clock.finish()
    parts = [(each["first_step"], each["last_step"]) for each in recorded[1:]]
    assert parts == [(1, 3), (2, 3)]


def test_a_rollout_is_recorded_with_the_step_that_it_is_for(clock):
    set_time, phase_clock, recorded, record = clock
    phase_clock.attach(record)
    for name in ("rollout", "reward", "save"):
        phase_clock.enter(name, 5)
        set_time.pass_by(2.0)
    phase_clock.finish()
    of_step = {"seconds": 2.0, "first_step": 5, "last_step": 5}
    assert recorded[1:] == [
        {"at": 1000.0, "phase": "rollout", **of_step},
        {"at": 1002.0, "phase": "reward", **of_step},
        {"at": 1004.0, "phase": "save", "seconds": 2.0},
    ]


def test_setting_the_clock_changes_no_length(clock):
    set_time, phase_clock, recorded, record = clock
    phase_clock.attach(record)
    phase_clock.enter("compile")
    set_time.pass_by(2.0)
    set_time.wall -= 10_000
    phase_clock.enter("step", 1)
    assert recorded[-1]["seconds"] == 2.0


def test_nothing_is_recorded_after_the_end(clock):
    _, phase_clock, recorded, record = clock
    phase_clock.attach(record)
    phase_clock.finish()
    phase_clock.finish()
    phase_clock.enter("shutdown")
    assert [each["phase"] for each in recorded] == ["start"]
