# SPDX-License-Identifier: Apache-2.0
"""Ranks that watch each other, as threads of this process; killed processes are in
tests/faults/test_launch.py.
"""

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from tessera.errors import TesseraError
from tessera.train.runtime import liveness as module
from tessera.train.runtime.liveness import Liveness

LIMIT = 60.0


class StopRequests:
    """Whether a run was asked to stop."""

    is_requested = False


@dataclass
class Rank:
    """One rank, and with what error its process would have ended."""

    liveness: Liveness
    stopping: StopRequests
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


def rank_of(number: int, peers: dict[int, socket.socket]) -> Rank:
    errors, ended, stopping = list[TesseraError](), threading.Event(), StopRequests()

    def end(error: TesseraError) -> None:
        errors.append(error)
        ended.set()

    liveness = Liveness(number, peers, stopping, end)  # type: ignore[arg-type]
    return Rank(liveness, stopping, errors, ended)


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    """Three ranks that watch each other."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        own = [socket.create_connection(server.getsockname()) for _ in range(2)]
        hosts = {number: server.accept()[0] for number in (1, 2)}
    made = [rank_of(0, hosts), *(rank_of(n, {0: own[n - 1]}) for n in (1, 2))]
    for rank in made:
        rank.liveness.start()
    yield made
    for rank in made:
        rank.liveness.leave()


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
    # What comes after is noticed: the end of rank 1 was not taken for a loss.
    ranks[2].die()
    assert ranks[0].error().what.startswith("rank 2 is gone")
    assert not ranks[1].errors


def test_nobody_is_missed_when_rank_0_ends_in_order(ranks):
    ranks[0].liveness.leave()
    for rank in ranks[1:]:
        assert not rank.ended.wait(0.3)


def test_a_run_that_was_asked_to_stop_ends_as_it_is_asked_to(ranks):
    for rank in ranks:
        rank.stopping.is_requested = True
    ranks[2].die()
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


@pytest.mark.parametrize("line", [b"\xff" * 500, b"lost x\n", b"lost -1\n", b"\n"])
def test_a_peer_that_says_nothing_that_is_known_is_gone(ranks, line):
    ranks[2].liveness._peers[0].sendall(line)
    for number in (0, 1):
        assert ranks[number].error().what.startswith("rank 2 is gone")
