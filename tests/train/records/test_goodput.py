# SPDX-License-Identifier: Apache-2.0
"""Goodput: every second of a run has one cause, and steps count once."""

import hypothesis
import hypothesis.strategies as st
import pytest

from tessera.train.records.goodput import CAUSES, goodput_of


def start(at, resumed_step=None):
    return {"event": "start", "process_start": at, "resumed_step": resumed_step}


def phase(name, at, seconds, **more):
    return {"event": "phase", "phase": name, "time": at, "seconds": seconds, **more}


def steps(first, last, at, seconds, data=0.0):
    more = {"first_step": first, "last_step": last, "data_seconds": data}
    return phase("step", at, seconds, **more)


def seconds_of(*events):
    found = goodput_of(events).seconds
    return {cause: seconds for cause, seconds in found.items() if seconds}


def test_each_phase_has_its_cause():
    found = seconds_of(
        start(0.0),
        phase("start", 0.0, 3.0),
        phase("rendezvous", 3.0, 1.0),
        phase("startup", 4.0, 2.0),
        phase("compile", 6.0, 10.0),
        steps(1, 10, 16.0, 20.0, data=5.0),
        phase("evaluation", 36.0, 4.0),
        phase("save", 40.0, 1.5),
        phase("of another version", 41.5, 0.5),
    )
    assert found == {
        "start": 5.0,
        "waiting_for_ranks": 1.0,
        "compile": 10.0,
        "step": 15.0,
        "data": 5.0,
        "evaluation": 4.0,
        "checkpoint": 1.5,
        "other": 0.5,
    }


def rollout(step, at, seconds, name="rollout"):
    return phase(name, at, seconds, first_step=step, last_step=step)


def test_rollouts_and_rewards_are_parts_of_the_steps_that_learn_from_them():
    goodput = goodput_of(
        [
            start(0.0),
            rollout(1, 0.0, 6.0),
            rollout(1, 6.0, 2.0, "reward"),
            steps(1, 2, 8.0, 3.0, data=1.0),
        ]
    )
    assert goodput.parts == {"rollout": 6.0, "reward": 2.0, "step": 2.0}
    assert goodput.seconds["step"] == 10.0
    assert goodput.shares["step"] == pytest.approx(10 / 11)


def test_a_rollout_is_repeated_with_the_steps_that_learn_from_it():
    events = [
        *(start(0.0), rollout(1, 0.0, 5.0), steps(1, 2, 5.0, 2.0)),
        *(rollout(3, 7.0, 6.0), rollout(3, 13.0, 1.0, "reward"), start(14.0, 2)),
    ]
    goodput = goodput_of(events)
    assert goodput.parts == {"rollout": 5.0, "reward": 0.0, "step": 2.0}
    assert seconds_of(*events) == {"step": 7.0, "repeated_steps": 7.0}


def test_a_rollout_that_some_steps_have_learned_from_is_not_repeated():
    events = [start(0.0), rollout(1, 0.0, 5.0), steps(1, 4, 5.0, 4.0), start(9.0, 2)]
    assert seconds_of(*events) == {"step": 7.0, "repeated_steps": 2.0}


def test_waiting_for_a_slow_rank_takes_no_time_from_rollouts():
    ranks = {"event": "ranks", "waiting_seconds": 9.0}
    events = [start(0.0), steps(1, 1, 0.0, 3.0), rollout(2, 3.0, 5.0), ranks]
    assert seconds_of(*events) == {"step": 5.0, "waiting_for_ranks": 3.0}


def test_steps_after_the_checkpoint_of_the_next_attempt_did_not_count():
    found = seconds_of(
        start(0.0), steps(1, 10, 0.0, 10.0), start(15.0, 4), steps(5, 10, 15.0, 6.0)
    )
    assert found == {"step": 10.0, "repeated_steps": 6.0, "restart": 5.0}


def test_an_attempt_that_begins_anew_repeats_everything():
    found = seconds_of(start(0.0), steps(1, 10, 0.0, 10.0), start(10.0))
    assert found == {"repeated_steps": 10.0}


def test_a_second_kill_does_not_repeat_what_was_repeated_already():
    found = seconds_of(
        *(start(0.0), steps(1, 10, 0.0, 10.0)),
        *(start(10.0, 5), steps(6, 8, 10.0, 3.0)),
        *(start(13.0, 5), steps(6, 10, 13.0, 5.0)),
    )
    assert found == {"step": 10.0, "repeated_steps": 8.0}


def test_waiting_for_a_slow_rank_is_no_step():
    ranks = {"event": "ranks", "waiting_seconds": 4.0}
    assert seconds_of(start(0.0), steps(1, 9, 0.0, 9.0), ranks) == {
        "step": 5.0,
        "waiting_for_ranks": 4.0,
    }
    ranks["waiting_seconds"] = 40.0
    found = seconds_of(start(0.0), steps(1, 9, 0.0, 9.0), ranks)
    assert found == {"waiting_for_ranks": 9.0}


def test_waiting_may_be_longer_than_the_last_part_of_the_steps():
    ranks = {"event": "ranks", "waiting_seconds": 3.0}
    parts = [steps(n, n, float(n), 1.0) for n in range(1, 6)]
    assert seconds_of(start(0.0), *parts, ranks) == {
        "step": 2.0,
        "waiting_for_ranks": 3.0,
    }


def test_a_clock_that_was_set_back_takes_no_time_away():
    assert seconds_of(start(100.0), steps(1, 2, 100.0, 2.0), start(50.0, 2)) == {
        "step": 2.0
    }


@pytest.mark.parametrize(
    "event",
    [
        {"event": "phase"},
        {"event": "phase", "phase": "step", "seconds": "3", "time": None},
        {"event": "phase", "phase": ["rollout"], "seconds": "3"},
        {"event": "phase", "phase": "save", "seconds": -1.0},
        {"event": "phase", "phase": "step", "first_step": 3, "last_step": 1},
        {"event": "start", "process_start": "yesterday"},
        {"event": "ranks"},
        {"event": "warning", "message": "anything"},
    ],
)
def test_an_event_without_its_fields_takes_no_time(event):
    assert seconds_of(event) == {}


NUMBERS = st.integers(0, 20)
EVENTS = st.one_of(
    st.builds(start, st.floats(0, 100), NUMBERS),
    st.builds(
        lambda first, more, at, seconds, data: steps(
            first, first + more, at, seconds, data
        ),
        *(NUMBERS, NUMBERS, st.floats(0, 100), st.floats(0, 10), st.floats(0, 10)),
    ),
    st.builds(
        phase,
        st.sampled_from(["compile", "save", "evaluation", "rollout", "reward"]),
        *(st.floats(0, 100), st.floats(0, 10)),
    ),
    st.builds(rollout, NUMBERS, st.floats(0, 100), st.floats(0, 10)),
    st.builds(lambda s: {"event": "ranks", "waiting_seconds": s}, st.floats(0, 10)),
)


@hypothesis.given(st.lists(EVENTS))
def test_every_second_has_one_cause(events):
    goodput = goodput_of(events)
    phases = sum(event["seconds"] for event in events if event["event"] == "phase")
    gaps = goodput.seconds["restart"]
    assert goodput.total_seconds == pytest.approx(phases + gaps, abs=1e-6)
    assert all(goodput.seconds[cause] >= -1e-9 for cause in CAUSES)
    assert all(seconds >= -1e-9 for seconds in goodput.parts.values())
    assert sum(goodput.parts.values()) == pytest.approx(
        goodput.seconds["step"], abs=1e-6
    )
