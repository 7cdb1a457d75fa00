# SPDX-License-Identifier: Apache-2.0
"""Ranks that watch each other, as threads of this process with one board; killed
processes are in tests/faults/test_launch.py.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from tessera.errors import TesseraError
from tessera.runtime import liveness as module
from tessera.runtime.cluster import Cluster
from tessera.runtime.liveness import Liveness

LIMIT = 60.0


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


@dataclass
class Rank:
    """One rank, and with what error its process would have ended."""

    liveness: Liveness
    stopping: threading.Event
    errors: list[TesseraError] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def die(self) -> None:
        """Close its connections, as the system does with those of a process."""
        self.liveness._left.set()  # it notices nothing any more
        for connection in [*self.liveness._peers.values()]:
            with suppress(OSError):  # the other one was the first to close it
                connection.shutdown(socket.SHUT_RDWR)

    def error(self) -> TesseraError:
        assert self.ended.wait(LIMIT), "nothing was noticed"
        (error,) = self.errors
        return error


def rank_of(number: int, count: int, board: Board) -> Rank:
    errors, ended, stopping = list[TesseraError](), threading.Event(), threading.Event()

    def end(error: TesseraError) -> None:
        errors.append(error)
        ended.set()

    cluster = Cluster(number, count, coordinator=("127.0.0.1", 1))
    liveness = Liveness(cluster, board, stopping.is_set, end)
    return Rank(liveness, stopping, errors, ended)


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    """Three ranks that watch each other."""
    board = Board()
    made = [rank_of(number, 3, board) for number in range(3)]
    starting = [threading.Thread(target=rank.liveness.start) for rank in made]
    for thread in starting:
        thread.start()
    for thread in starting:
        thread.join(LIMIT)
    assert all(rank.liveness._peers for rank in made)
    yield made
    for rank in made:
        rank.liveness.leave()


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_all_others_end_with_a_rank_that_dies_and_name_it(ranks):
    ranks[2].die()
    for number in (0, 1):
        error = ranks[number].error()
        assert error.code == "T715"
        assert error.exit_code == 143
        assert error.what == f"rank 2 is gone, and rank {number} ends with it"


def test_all_others_end_with_rank_0(ranks):
    ranks[0].die()
    for number in (1, 2):
        assert ranks[number].error().what.startswith("rank 0 is gone")


def test_a_rank_that_ends_in_order_is_not_missed(ranks):
    ranks[1].liveness.leave()
    wait_until(lambda: 1 not in ranks[0].liveness._peers)
    # What comes after is noticed: the end of rank 1 was read, and not taken for a loss.
    ranks[2].die()
    assert ranks[0].error().what.startswith("rank 2 is gone")
    assert not ranks[1].errors


def test_nobody_is_missed_when_rank_0_ends_in_order(ranks):
    ranks[0].liveness.leave()
    for rank in ranks[1:]:
        assert not rank.ended.wait(0.3)


def test_a_run_that_was_asked_to_stop_ends_as_it_is_asked_to(ranks):
    for rank in ranks:
        rank.stopping.set()
    ranks[2].die()
    wait_until(lambda: 2 not in ranks[0].liveness._peers)
    assert not ranks[0].ended.wait(0.3)
    assert not ranks[1].ended.is_set()


def test_ranks_that_fail_together_each_say_why(ranks, monkeypatch):
    monkeypatch.setattr(module, "_PATIENCE", LIMIT)
    for rank in (1, 0, 2):
        ranks[rank].liveness.fail()
        ranks[rank].die()
    for rank in ranks:
        assert not rank.ended.wait(0.3)


def test_a_failure_of_one_rank_ends_the_others_after_a_moment(ranks, monkeypatch):
    monkeypatch.setattr(module, "_PATIENCE", 0.2)
    ranks[1].liveness.fail()
    for number in (0, 2):
        assert ranks[number].error().what.startswith("rank 1 is gone")


def test_an_error_waits_for_what_explains_it(ranks, monkeypatch):
    monkeypatch.setattr(module, "_ENDING", 0.0)
    monkeypatch.setattr(module, "_EXPLAINED", LIMIT)
    ranks[2].die()
    ranks[0].liveness.wait_for_loss()
    assert ranks[0].error().what.startswith("rank 2 is gone")


def test_strangers_are_neither_ranks_nor_missed(ranks):
    host = ranks[0].liveness
    port, _ = host._board.texts("tessera/liveness")["0"].split()
    for line in (b"", b"GET / HTTP/1.1\r\n\r\n", b"x 1\n", b"\xff" * 500):
        with socket.create_connection(("127.0.0.1", int(port))) as stranger:
            stranger.settimeout(LIMIT)
            with suppress(OSError):  # closed at any moment
                stranger.sendall(line)
                stranger.shutdown(socket.SHUT_WR)
            with suppress(ConnectionResetError):
                assert stranger.recv(10) == b""
    assert sorted(host._peers) == [1, 2]
    assert not ranks[0].ended.is_set()
