# SPDX-License-Identifier: Apache-2.0
"""Ranks that meet, as threads, over the loopback interface."""

import socket
import threading
from typing import Any

import pytest

from tessera.errors import (
    CoordinatorError,
    FolderInUseError,
    MissingRanksError,
    RanksDifferError,
    TesseraError,
)
from tessera.train.runtime import rendezvous
from tessera.train.runtime.cluster import Cluster
from tessera.train.runtime.launcher import free_port

SAME = {"versions": {"jax": "0.10.2"}, "configuration": {"training.seed": "0"}}
HOST = "127.0.0.1"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_SETTLE", 0.3)
    monkeypatch.setattr(rendezvous, "_EXTRA_WAIT", 0.5)


def shared_by(*given: Any, **options: Any) -> str:
    """What rank 0 shares with a rank, which leaves at once."""
    shared, peers = rendezvous.rendezvous(*given, **options)
    for connection in peers.values():
        connection.close()
    return shared


def met(
    *ranks: tuple[int, int, Any], timeout: float = 60.0, port: int | None = None
) -> list[Any]:
    """What each rank gets: what rank 0 shares, or an error."""
    port, found = port or free_port(), list[Any](ranks)

    def one(place: int, rank: int, count: int, facts: Any) -> None:
        cluster = Cluster(rank, count, coordinator=(HOST, port))
        try:
            found[place] = shared_by(
                cluster,
                facts,
                timeout=timeout,
                shared=f"of {rank}",
                report=lambda _: None,
            )
        except TesseraError as error:
            found[place] = error

    threads = [
        threading.Thread(target=one, args=(place, *rank), daemon=True)
        for place, rank in enumerate(ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=240)
        assert not thread.is_alive(), "a rank waits for ever"
    return found


def test_ranks_that_agree_take_what_rank_0_shares():
    assert met(*((rank, 3, SAME) for rank in range(3))) == ["of 0"] * 3


def test_the_connections_stay_open_and_nothing_that_follows_the_answer_is_lost():
    port, found = free_port(), dict[int, Any]()

    def one(rank: int) -> None:
        cluster = Cluster(rank, 3, coordinator=(HOST, port))
        _, found[rank] = rendezvous.rendezvous(
            cluster, SAME, timeout=60, shared="x", report=lambda _: None
        )
        if rank == 0:
            for number, connection in found[0].items():
                connection.sendall(f"to {number}\n".encode())

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=240)
    assert sorted(found[0]) == [1, 2]
    for rank in (1, 2):
        assert found[rank][0].recv(100) == f"to {rank}\n".encode()
        found[rank][0].sendall(b"back")
        assert found[0][rank].recv(100) == b"back"
    for connection in (*found[0].values(), found[1][0], found[2][0]):
        connection.close()


def test_every_rank_is_told_what_differs():
    other = SAME | {"configuration": {"training.seed": "1", "name": "x"}}
    errors = met((0, 3, SAME), (1, 3, other), (2, 3, SAME))
    assert [type(error) for error in errors] == [RanksDifferError] * 3
    assert len({str(error) for error in errors}) == 1
    assert errors[0].what == "the ranks have different configurations"
    assert errors[0].got == (
        "configuration: training.seed is 0 on ranks 0, 2; 1 on rank 1\n"
        "configuration: name is not there on ranks 0, 2; x on rank 1"
    )
    assert errors[0].exit_code == 76


def test_devices_of_two_kinds_are_not_homogeneous():
    one, two = (SAME | {"devices": {"kind": kind}} for kind in ("H100", "H200"))
    errors = met((0, 2, one), (1, 2, two))
    assert all("Devices are not homogeneous" in str(error) for error in errors)


def test_why_rank_0_refuses_the_run_is_told_to_all():
    """Its folder belongs to another run, for instance."""
    refusal = FolderInUseError(
        "another run writes there", got="it is \x1b[2J", fix="wait"
    )
    port, found = free_port(), list[Any]()

    def one(rank: int) -> None:
        cluster = Cluster(rank, 3, coordinator=(HOST, port))
        given = refusal if rank == 0 else None
        with pytest.raises(FolderInUseError) as caught:
            rendezvous.rendezvous(
                cluster, SAME, given, timeout=5, report=lambda _: None
            )
        found.append(str(caught.value))

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    # Whoever shows what a peer said shows no escape sequence of it.
    assert sorted(found) == sorted(
        [str(refusal), *[str(refusal).replace("\x1b", "\\x1b")] * 2]
    )


@pytest.mark.parametrize(
    "line", [b"[" * 200_000, b'{"tessera": 3, "rank": Infinity, "world_size": 2}']
)
def test_no_line_of_a_peer_ends_rank_0(line):
    assert rendezvous.Handshake.read(line) is None


def test_strangers_that_stay_silent_are_closed_when_there_are_too_many(monkeypatch):
    monkeypatch.setattr(rendezvous, "_MAX_STRANGERS", -1)
    own = rendezvous.Handshake(0, 2, rendezvous.START, "here", {})
    address = ("127.0.0.1", free_port())
    with rendezvous.listen(address) as listener:
        host = rendezvous._Host(listener, own, timeout=1)
        with socket.create_connection(address, timeout=60) as first:
            host._accept()
            with socket.create_connection(address, timeout=60) as second:
                host._accept()
                assert first.recv(1) == b""
                second.setblocking(False)
                with pytest.raises(BlockingIOError):
                    second.recv(1)


@pytest.mark.full
def test_the_handshake_of_another_rendezvous_is_not_counted():
    """A rank that comes late, while those of the run compare what they compiled."""
    port, found = free_port(), list[Any]()

    def one(rank: int, topic: str, timeout: float) -> None:
        cluster = Cluster(rank, 2, coordinator=(HOST, port))
        try:
            shared = shared_by(
                cluster,
                SAME,
                topic=topic,
                timeout=timeout,
                shared="x",
                report=lambda _: None,
            )
            found.append((rank, topic, shared))
        except MissingRanksError as error:
            found.append((rank, topic, error.what.partition(" within")[0]))

    late = threading.Thread(target=one, args=(1, rendezvous.START, 3.0))
    rank_0 = threading.Thread(target=one, args=(0, "step", 60.0))
    for thread in (late, rank_0):
        thread.start()
    late.join(60)
    one(1, "step", 60.0)
    rank_0.join(60)
    assert sorted(found) == [
        (0, "step", "x"),
        (1, "start", "rank 1 met nobody"),
        (1, "step", "x"),
    ]


def test_ranks_that_do_not_come_to_a_later_rendezvous_are_named():
    cluster = Cluster(0, 2, coordinator=(HOST, free_port()))
    with pytest.raises(MissingRanksError) as error:
        rendezvous.rendezvous(
            cluster, SAME, topic="step", timeout=0.5, report=lambda _: None
        )
    assert error.value.what == "the ranks did not meet within 0.5 s to compare: step"
    assert error.value.got.startswith("rank 1 of 2 is missing\n")


@pytest.mark.full
def test_a_missing_rank_is_named_on_every_other():
    errors = met((0, 4, SAME), (2, 4, SAME), timeout=3)
    assert [type(error) for error in errors] == [MissingRanksError] * 2
    for error in errors:
        assert error.what == "the ranks did not meet within 3 s"
        assert error.got.startswith("ranks 1, 3 of 4 are missing\nthere: rank 0: ")


def test_a_rank_that_is_there_twice_is_named():
    errors = met((0, 3, SAME), (1, 3, SAME), (1, 3, SAME))
    for error in errors:
        assert "rank 1 is there 2 times: " in error.got
        assert "rank 2 of 3 is missing" in error.got


def test_two_ranks_0_are_told_of_each_other():
    # Of a third rank that does not come: with it, the others would have left already.
    errors = met((0, 3, SAME), (0, 3, SAME), (1, 3, SAME))
    for error in errors:
        assert "rank 0 is there 2 times" in error.got


def test_a_second_rank_0_of_a_run_that_goes_on_is_told_soon():
    """Where the first one has met the others, JAX listens and no rank comes."""
    port = free_port()
    with socket.create_server((HOST, port)):
        error = alone(port, timeout=600)
    assert isinstance(error, CoordinatorError)
    assert error.got == f"{HOST}:{port}: Address already in use"
    assert "if it is not this run, started before" in error.fix


def test_a_port_that_becomes_free_is_no_mistake(monkeypatch):
    port, seen, look = free_port(), list[Any](), rendezvous._busy
    server = socket.create_server((HOST, port))

    def look_once(address: Any) -> Any:
        seen.append(look(address))
        server.close()
        return seen[-1]

    monkeypatch.setattr(rendezvous, "_busy", look_once)
    assert met((0, 2, SAME), (1, 2, SAME), port=port) == ["of 0"] * 2
    assert isinstance(seen[0], CoordinatorError)
    assert set(seen[1:]) == {None}


def test_a_rank_of_a_run_of_another_size_is_named():
    errors = met((0, 2, SAME), (1, 3, SAME))
    for error in errors:
        assert "is of a run of 3 ranks, rank 0 of one of 2" in error.got


def test_without_rank_0_the_others_say_where_they_looked():
    (error,) = met((1, 2, SAME), timeout=0.5)
    assert isinstance(error, MissingRanksError)
    assert f"no rank 0 at {HOST}:" in error.got
    assert "refused" in error.got
    assert "whether the run has begun with another rank 1" in error.fix


def test_a_connection_to_itself_is_not_rank_0(monkeypatch):
    """TCP makes one where nobody listens and the system draws the same port."""
    connect, own_addresses = socket.create_connection, list[Any]()

    def connect_to_itself(address: Any, timeout: float) -> socket.socket:
        connection = connect(address, timeout, source_address=address)
        own_addresses.append(connection.getsockname())
        return connection

    monkeypatch.setattr(socket, "create_connection", connect_to_itself)
    port = free_port()
    (error,) = met((1, 2, SAME), timeout=0.5, port=port)
    assert own_addresses[0] == (HOST, port + 1)
    assert isinstance(error, MissingRanksError)


def alone(port: int, timeout: float = 0.5, host: str = HOST) -> TesseraError:
    cluster = Cluster(0, 2, coordinator=(host, port))
    with pytest.raises(TesseraError) as error:
        rendezvous.rendezvous(cluster, SAME, timeout=timeout, report=lambda _: None)
    return error.value


def test_a_busy_port_is_named():
    port = free_port()
    with socket.create_server((HOST, port + 1)):
        error = alone(port)
    assert isinstance(error, CoordinatorError)
    assert error.what == "a port of rank 0 is busy"
    assert error.got == f"{HOST}:{port + 1}: Address already in use"


def test_a_busy_port_of_the_coordinator_is_told_to_all():
    port = free_port()
    with socket.create_server((HOST, port)):
        errors = met((0, 2, SAME), (1, 2, SAME), port=port)
    for error in errors:
        assert isinstance(error, CoordinatorError)
        assert error.got == f"{HOST}:{port}: Address already in use"


def test_a_machine_without_an_address_is_named():
    error = alone(29500, host="no-such-machine.invalid")
    assert isinstance(error, CoordinatorError)
    assert error.what == "the machine of rank 0 is not known by its name"
    assert error.got.startswith("'no-such-machine.invalid': ")


def test_something_else_that_answers_is_no_rank_0():
    port = free_port()

    def answer() -> None:
        with listener, listener.accept()[0] as connection:
            connection.recv(100)
            connection.sendall(b"HTTP/1.1 400 Bad Request\n")

    listener = socket.create_server((HOST, port + 1))
    threading.Thread(target=answer, daemon=True).start()
    cluster = Cluster(1, 2, coordinator=(HOST, port))
    with pytest.raises(CoordinatorError, match="something else listens"):
        rendezvous.rendezvous(cluster, SAME, timeout=60, report=lambda _: None)


def test_strangers_do_not_disturb_the_host():
    """A scan of ports, a browser, half a line."""
    port, found = free_port(), list[Any]()

    def rank_0() -> None:
        cluster = Cluster(0, 2, coordinator=(HOST, port))
        shared = shared_by(cluster, SAME, timeout=60, shared="x", report=lambda _: None)
        found.append(shared)

    thread = threading.Thread(target=rank_0, daemon=True)
    thread.start()
    lines = [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b'{"tessera": 3}\n',
        b'{"tessera": ',
        b"[]\n",
    ]
    for line in lines:
        for _ in range(1000):
            try:
                connection = socket.create_connection((HOST, port + 1))
                break
            except ConnectionRefusedError:
                threading.Event().wait(0.05)
        connection.sendall(line)
        connection.close()
    cluster = Cluster(1, 2, coordinator=(HOST, port))
    assert shared_by(cluster, SAME, timeout=60, report=lambda _: None) == "x"
    thread.join(timeout=240)
    assert found == ["x"]
