# SPDX-License-Identifier: Apache-2.0
"""Ranks that agree on where to stop, as threads with one board; real processes are in
tests/faults/test_signals.py."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack

import pytest

from tessera.train.runtime import stop_requests as module
from tessera.train.runtime.stop_requests import StopRequests


class Board:
    """What the coordinator keeps for all ranks."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}

    def put(self, key: str, text: str) -> None:
        self.kept[key] = text

    def texts(self, folder: str) -> dict[str, str]:
        return {
            key.removeprefix(f"{folder}/"): text
            for key, text in self.kept.items()
            if key.startswith(f"{folder}/")
        }


@pytest.fixture
def left(monkeypatch) -> list[int]:
    """The codes with which threads would have ended the process."""
    codes: list[int] = []
    monkeypatch.setattr(module.os, "_exit", codes.append)
    return codes


def wait_for(codes: list[int]) -> int:
    deadline = time.monotonic() + 240
    while not codes:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return codes[0]


def ask(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def test_a_run_goes_on_until_it_is_asked_to_end():
    before = signal.getsignal(signal.SIGTERM)
    with StopRequests(60.0) as stopping:
        assert all(stopping.should_continue() for _ in range(1000))
        assert stopping.exit_code is None
        ask(signal.SIGTERM)
        while stopping.should_continue():
            time.sleep(0.01)
        assert not stopping.should_continue()
        assert stopping.exit_code == 75
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGUSR2, 75), (signal.SIGINT, 130)]
)
def test_each_signal_has_its_exit_code(number, code):
    with StopRequests(60.0) as stopping:
        assert stopping.should_continue()
        ask(number)
        while stopping.should_continue():
            time.sleep(0.01)
        assert stopping.exit_code == code


@pytest.mark.parametrize("asked_first", [0, 2])
def test_all_ranks_stop_at_one_point_that_none_has_passed(asked_first):
    """One rank hears the signal; each is at another place when it learns of it."""
    board, count = Board(), 3
    begun = dict.fromkeys(range(count), 0)
    with ExitStack() as stack:
        # That of this thread, the main one, hears signals.
        stopped = {
            rank: stack.enter_context(StopRequests(60.0, rank=rank))
            for rank in sorted(range(count), key=lambda rank: rank != asked_first)
        }

        def work(rank: int) -> None:
            pace = random.Random(rank)
            while stopped[rank].should_continue():
                begun[rank] += 1
                time.sleep(pace.random() * 0.01)

        for one in stopped.values():
            one.connect(board, count)
        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(count)]
        for thread in threads:
            thread.start()
        while min(begun.values()) < 5:
            time.sleep(0.01)
        ask(signal.SIGTERM)
        for thread in threads:
            thread.join(240)
        assert len(set(begun.values())) == 1
        assert {one.exit_code for one in stopped.values()} == {75}
        said = [int(text.split()[1]) for text in board.texts("tessera/stop").values()]
        assert len(said) == count
        assert max(said) == begun[0]


@pytest.mark.parametrize(
    ("rank", "text"),
    [
        ("0", "15"),
        ("0", "15 -3"),
        ("0", "15 3 \x1b[2J"),
        ("0", "9 3"),
        ("0", "64 3"),
        ("0", "15 " + "9" * 5000),
        ("0", ""),
        ("7", "15 3"),
        ("-1", "15 3"),
        ("one", "15 3"),
    ],
)
def test_what_a_stranger_writes_on_the_board_stops_nobody(rank, text):
    board = Board()
    board.put(f"tessera/stop/{rank}", text)
    with StopRequests(60.0, rank=1) as stopping:
        stopping.connect(board, 2)
        stopping._read_at = -1000.0
        assert stopping._read_requests() == {}
        assert stopping.should_continue()


def test_before_the_first_point_a_signal_ends_the_process(left, capfd):
    with StopRequests(60.0):
        ask(signal.SIGTERM)
        assert wait_for(left) == 75
    said = capfd.readouterr().err
    assert said == "SIGTERM: nothing is to be saved before the first step\n"


def test_one_signal_that_comes_twice_is_one(left, monkeypatch):
    monkeypatch.setattr(module, "_ECHO", 600.0)
    with StopRequests(60.0) as stopping:
        assert stopping.should_continue()
        ask(signal.SIGTERM)
        time.sleep(0.3)
        ask(signal.SIGTERM)
        time.sleep(0.3)
        assert left == []
        assert not stopping.should_continue()


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_process(left, second, monkeypatch):
    monkeypatch.setattr(module, "_ECHO", 0.0)
    with StopRequests(60.0) as stopping:
        assert stopping.should_continue()
        ask(signal.SIGTERM)
        time.sleep(0.3)
        ask(second)
        assert wait_for(left) == 128 + second


def test_a_second_signal_after_the_run_has_saved_has_the_code_of_the_first(
    left, monkeypatch
):
    """Slurm signals the ranks that are left when one has ended."""
    monkeypatch.setattr(module, "_ECHO", 0.0)
    with StopRequests(60.0) as stopping:
        assert stopping.should_continue()
        ask(signal.SIGUSR2)
        while stopping.should_continue():
            time.sleep(0.01)
        stopping.mark_saved()
        ask(signal.SIGTERM)
        assert wait_for(left) == 75


def test_a_request_from_inside_stops_the_run_as_sigterm_does(caplog):
    with StopRequests(60.0) as stopping:
        assert stopping.should_continue()
        stopping.request("the time is over")
        stopping.request("it is over once more")
        while stopping.should_continue():
            time.sleep(0.01)
        assert stopping.exit_code == 75
    (message,) = [record.getMessage() for record in caplog.records]
    assert message == (
        "the time is over: the run is to save and end, in 60 s; a second signal ends "
        "it at once"
    )


def test_a_request_from_inside_of_one_rank_stops_all_after_the_same_step():
    board = Board()
    with StopRequests(60.0, rank=0) as first, StopRequests(60.0, rank=1) as second:
        for one in (first, second):
            one.connect(board, 2)
        assert first.should_continue()
        second.request("a notice")
        begun = [1, 0]
        for rank, one in ((1, second), (0, first)):
            while one.should_continue():
                begun[rank] += 1
        assert begun[0] == begun[1]
        assert [first.exit_code, second.exit_code] == [75, 75]


def test_before_the_first_point_a_request_ends_the_process(left, capfd):
    with StopRequests(60.0) as stopping:
        stopping.request("the time is over")
        assert wait_for(left) == 75
    said = capfd.readouterr().err
    assert said == "the time is over: nothing is to be saved before the first step\n"


def test_a_request_has_the_grace_period_of_sigterm(left, capfd):
    with StopRequests(0.2) as stopping:
        assert stopping.should_continue()
        stopping.request("the time is over")
        assert wait_for(left) == 75
    assert "the time is over: rank 0 did not end in 0.2 s" in capfd.readouterr().err


def test_the_signal_that_a_notice_announces_does_not_end_the_process(left, monkeypatch):
    """A cloud sends its notice, then SIGTERM; the second signal is the one to obey."""
    monkeypatch.setattr(module, "_ECHO", 0.0)
    with StopRequests(60.0) as stopping:
        assert stopping.should_continue()
        stopping.request("a notice")
        while stopping.should_continue():
            time.sleep(0.01)
        ask(signal.SIGTERM)
        while not stopping._requested_at:
            time.sleep(0.01)
        assert left == []
        assert stopping.exit_code == 75
        ask(signal.SIGTERM)
        assert wait_for(left) == 128 + signal.SIGTERM


def test_a_request_after_a_signal_changes_nothing(left):
    with StopRequests(60.0) as stopping:
        assert stopping.should_continue()
        ask(signal.SIGINT)
        while stopping.should_continue():
            time.sleep(0.01)
        stopping.request("a notice")
        time.sleep(0.3)
        assert stopping.exit_code == 130
        assert left == []


FORKED = """
import os, signal, time
from tessera.train.runtime.stop_requests import StopRequests
with StopRequests(60.0) as stopping:
    assert stopping.should_continue()
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.write(write, b"here")
        time.sleep(600)
        os._exit(0)
    os.read(read, 4)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGTERM
    time.sleep(0.3)
    assert stopping.should_continue()
"""


@pytest.mark.slow(reason="it starts a process")
def test_a_process_that_is_forked_has_signals_of_its_own():
    subprocess.run([sys.executable, "-c", FORKED], check=True, timeout=240)


def test_a_signal_that_is_ignored_stays_so():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopRequests(60.0) as stopping:
            ask(signal.SIGINT)
            time.sleep(0.3)
            assert stopping.should_continue()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
