# SPDX-License-Identifier: Apache-2.0
"""A rank that is slow is named, and one that only waits for it is not."""

import logging

import jax
import pytest

from tessera.train.loop import rank_times
from tessera.train.loop.rank_times import RankTimes, device_seconds, slowest_of
from tessera.train.loop.run_records import RunRecords
from tessera.train.records.events import EventLog


class Board:
    """A key-value store that this process has for itself."""

    def __init__(self):
        self.entries = {}

    def put(self, key, text):
        self.entries[key] = text

    def texts(self, folder):
        prefix = f"{folder}/"
        return {key.removeprefix(prefix): text for key, text in self.entries.items()}


class Recorded(RunRecords):
    """Keeps what is recorded."""

    def __init__(self):
        super().__init__(EventLog(None))
        self.events = []

    def write(self, event, **fields):
        self.events.append({"event": event, **fields})


@pytest.fixture
def ranks(monkeypatch):
    """Takes steps of three ranks, whose devices and clocks are the test's."""
    board, devices = Board(), {0: 0.001, 1: 0.001, 2: 0.001}
    monkeypatch.setattr(rank_times.processes, "board", lambda: board)
    monkeypatch.setattr(rank_times, "device_seconds", devices.__getitem__)
    monkeypatch.setattr(rank_times, "_EVERY_S", 0.0)
    recorded = Recorded()
    each = [RankTimes(rank, rank, 3, recorded) for rank in devices]

    def step(number, hosts, seconds=1.0):
        for rank in reversed(range(3)):
            each[rank].take(number, seconds, seconds - hosts[rank])

    step.events, step.devices, step.board = recorded.events, devices, board
    return step


def warnings(caplog):
    return [r.message for r in caplog.records if r.levelno == logging.WARNING]


def test_ranks_that_take_as_long_as_each_other_are_recorded_and_not_warned_of(
    ranks, caplog
):
    ranks(1, [0.10, 0.11, 0.12])
    (event,) = ranks.events
    assert event["event"] == "ranks"
    assert event["seconds"] == pytest.approx({"0": 0.10, "1": 0.11, "2": 0.12})
    assert event["waiting_seconds"] == 0.0
    assert not warnings(caplog)


def test_a_rank_whose_host_holds_up_the_others_is_named_once(ranks, caplog):
    for number in range(1, 6):
        ranks(number, [0.1, 0.9, 0.2])
        assert len(warnings(caplog)) == (number >= 3)
    assert warnings(caplog) == [
        "rank 1 is slow, and all others wait for it: the host's part of a step (data, "
        "Python) takes 0.9 s, the median of the others 0.15 s"
    ]
    assert [e["waiting_seconds"] for e in ranks.events] == pytest.approx(5 * [0.75])


def test_a_host_that_takes_little_of_a_step_holds_up_nobody(ranks, caplog):
    ranks(1, [0.01, 0.4, 0.01])
    assert ranks.events[0]["waiting_seconds"] == 0.0
    assert not warnings(caplog)


def test_a_rank_that_is_slow_now_and_then_is_not_named(ranks, caplog):
    slow, fast = [0.1, 0.9, 0.2], [0.1, 0.1, 0.2]
    for number, hosts in enumerate([slow, slow, fast, slow, [0.9, 0.1, 0.2], slow], 1):
        ranks(number, hosts)
    assert not warnings(caplog)


def test_a_device_is_named_when_it_was_slow_three_times_in_a_row(ranks, caplog):
    ranks.devices[2] = 0.002
    hosts = [0.1, 0.1, 0.1]
    ranks(1, hosts)
    ranks(2, hosts)
    assert not warnings(caplog)
    ranks(3, hosts)
    assert warnings(caplog) == [
        "rank 2 is slow, and all others wait for it: a matmul on its devices takes "
        "0.002 s, the median of the others 0.001 s"
    ]


def test_one_measurement_of_a_device_counts_once(ranks, caplog):
    ranks.devices[2] = 0.002
    ranks(1, [0.1, 0.1, 0.1])
    (key,) = (key for key in ranks.board.entries if key.endswith("/2"))
    old = ranks.board.entries[key]
    ranks.devices[2] = 0.001
    for number in range(2, 6):  # the others do not hear from rank 2 meanwhile
        ranks.board.put = lambda k, text: ranks.board.entries.__setitem__(
            k, old if k == key else text
        )
        ranks(number, [0.1, 0.1, 0.1])
    assert not warnings(caplog)


def test_what_is_no_time_is_left_out_until_all_ranks_have_one(ranks):
    ranks.board.entries["tessera/rank_times/1"] = "nan 1.0 2.0 3.0"
    ranks.board.put = lambda key, text: (
        None if key.endswith("/1") else ranks.board.entries.__setitem__(key, text)
    )
    ranks(1, [0.1, 0.1, 0.1])
    assert not ranks.events


def test_a_broken_connection_ends_the_comparison_and_not_the_run(ranks):
    def broken(*_):
        raise RuntimeError("the coordinator is gone")

    ranks.board.put = broken
    ranks(1, [0.1, 0.1, 0.1])
    ranks.board.put = None
    ranks(2, [0.1, 0.1, 0.1])
    assert not ranks.events


def test_a_single_rank_has_none_to_compare(monkeypatch):
    recorded = Recorded()
    RankTimes(jax.local_devices(), 0, 1, recorded).take(1, 1.0, 0.5)
    assert not recorded.events


def test_cpu_devices_are_not_measured():
    assert device_seconds(jax.local_devices()) == 0.0


def test_a_matmul_is_measured_on_a_device(monkeypatch):
    monkeypatch.setattr(rank_times, "_array", lambda device: jax.numpy.ones((8, 8)))
    assert rank_times._matmul_seconds(jax.local_devices()[0]) > 0


def test_the_slowest_of_two_is_compared_with_the_other():
    assert slowest_of({0: 2.0, 1: 1.0}) == (0, 1.0)
