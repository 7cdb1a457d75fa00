# SPDX-License-Identifier: Apache-2.0
"""Where the ranks of a run meet before JAX knows of them, in plain Python.

Rank 0 listens; every other rank says who it is and what it has, one line of JSON, and
waits for the answer, which is the same for all: they agree, or the error that each of
them raises. JAX would abort the process instead, with no word on who is missing, or
start a run whose parts differ.

Whatever a peer sends, it ends nobody: a line has a length, is parsed strictly, and is
shown without its escape sequences. The connection is neither encrypted nor
authenticated, like that of JAX's own coordinator: a firewall has to keep strangers from
both.
"""

import json
import os
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from tessera.errors import (
    CoordinatorError,
    FolderInUseError,
    MissingRanksError,
    OutputPathError,
    RanksDifferError,
    TesseraError,
)
from tessera.runtime.addresses import Listener, check_port, find_host, host_and_port
from tessera.runtime.cluster import Address, Cluster
from tessera.runtime.rank_consistency import (
    Facts,
    difference_error,
    differences,
    listed,
    shown,
)
from tessera.untrusted import count_of, parse_json, printable, text_of

_PROTOCOL: Final = 1
# A rank's own line has about 30 KiB: the configuration, and a fingerprint of each file.
_LONGEST_MESSAGE: Final = 4 * 2**20
_LONGEST_TEXT: Final = 16 * 2**10
_LONGEST_NAME: Final = 200
_MOST_RANKS: Final = 2**20
# Connections that have not sent a line yet, beyond one for each rank.
_MOST_STRANGERS: Final = 64
# After the first mistake was seen, how long others may be late to be named as well.
_SETTLE: Final = 3.0
# How much longer than rank 0 the others wait, so that its answer reaches them.
_LONGER: Final = 10.0
_PAUSE: Final = 0.2
_NAMED: Final = 16
_ERRORS: Final = {
    kind.code: kind
    for kind in (
        *(CoordinatorError, MissingRanksError, RanksDifferError),
        *(FolderInUseError, OutputPathError),
    )
}


@dataclass(frozen=True)
class Hello:
    """What a rank says when it comes.

    Attributes:
      rank: Its number.
      world_size: How many it believes there are.
      where: ``"host, process 1234"``.
      facts: What has to be the same everywhere.
    """

    rank: int
    world_size: int
    where: str
    facts: Facts

    @classmethod
    def of(cls, cluster: Cluster, facts: Facts) -> Self:
        """That of this process."""
        where = f"{socket.gethostname()}, process {os.getpid()}"
        return cls(cluster.rank, cluster.world_size, where, facts)

    def as_line(self) -> bytes:
        """One line of JSON."""
        return _line({"tessera": _PROTOCOL, **vars(self)})

    @classmethod
    def read(cls, line: bytes) -> Self | None:
        """From a line; None where the line is something else."""
        try:
            said = parse_json(line, longest=_LONGEST_MESSAGE)
            if count_of(said["tessera"]) != _PROTOCOL:
                return None
            facts = {
                section: {name: text_of(value) for name, value in named.items()}
                for section, named in said["facts"].items()
            }
            rank, count = count_of(said["rank"]), count_of(said["world_size"])
            where = printable(text_of(said["where"]), longest=_LONGEST_NAME)
            exists = rank < count <= _MOST_RANKS
            return cls(rank, count, where, facts) if exists else None
        except (ValueError, KeyError, TypeError, AttributeError):
            return None


def meet(
    cluster: Cluster,
    facts: Facts,
    refusal: TesseraError | None = None,
    *,
    timeout: float,
    shared: str = "",
    say: Callable[[str], None],
) -> str:
    """Wait for all ranks, and see that they are of one run.

    Args:
      cluster: This rank's place.
      facts: What has to be the same on every rank.
      refusal: Of rank 0: why there is no run; all ranks raise it.
      timeout: Seconds until those who have not come are missing.
      shared: Of rank 0: what the others take from it.
      say: Shows a line to a person who waits.

    Returns:
      What rank 0 shares.

    Raises:
      CoordinatorError: [T705] rank 0's address is not known or its ports are busy.
      MissingRanksError: [T706] ranks are missing, or there twice, or count otherwise.
      RanksDifferError: [T707] their facts differ.
      TesseraError: What rank 0 gave as ``refusal``.
    """
    assert cluster.coordinator is not None, "a process alone meets nobody"
    host, port = cluster.coordinator
    hello = Hello.of(cluster, facts)
    until = time.monotonic() + timeout
    find_host(host, until, say)
    where = host, port + 1
    if cluster.rank:
        return _visit(where, hello, until + _LONGER, say)
    try:
        listener = Listener(where)
    except CoordinatorError as busy:
        # It may be another rank 0 that listens, which then says what is wrong.
        answer, _ = _ask(where, hello, time.monotonic() + 2 * _SETTLE, say)
        if not answer.startswith(b'{"agreed"'):
            raise busy from None
        return _read_answer(answer, where)
    with listener:
        meeting = _Meeting(listener, hello, timeout)
        return meeting.hold(cluster.coordinator, shared, refusal)


class _Meeting:
    """Rank 0's side: those who came, and the answer."""

    def __init__(self, listener: Listener, own: Hello, timeout: float) -> None:
        self._own, self._timeout = own, timeout
        self._came: list[Hello] = [own]
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener.socket, selectors.EVENT_READ)
        self._listener = listener.socket
        self._heard: dict[socket.socket, bytearray] = {}
        self._waiting: list[socket.socket] = []

    def hold(
        self, coordinator: Address, shared: str, refusal: TesseraError | None
    ) -> str:
        """Receive the others, and answer all of them alike."""
        try:
            self._receive(coordinator)
            error = refusal or _busy(coordinator) or self._mistake()
            answer: dict[str, Any] = {"agreed": error is None, "shared": shared}
            if error is not None:
                answer |= {"code": error.code, "what": error.what}
                answer |= {"got": error.got, "fix": error.fix}
            self._answer(_line(answer))
        finally:
            self._selector.close()
            for connection in (*self._heard, *self._waiting):
                connection.close()
        if error is not None:
            raise error
        return shared

    def _receive(self, coordinator: Address) -> None:
        started = time.monotonic()
        if _busy(coordinator):
            # Most often by this run, started before; or by one that is about to end.
            self._receive_until(started + min(_SETTLE, self._timeout))
            if _busy(coordinator):
                return
        self._receive_until(started + self._timeout)

    def _receive_until(self, until: float) -> None:
        while self._absent and time.monotonic() < until:
            for key, _ in self._selector.select(_PAUSE):
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                if connection is self._listener:
                    self._accept()
                elif connection in self._heard:  # not turned away just now
                    self._read(connection)
            if self._layout_mistakes(missing=False):
                until = min(until, time.monotonic() + _SETTLE)

    @property
    def _absent(self) -> list[int]:
        """Ranks that have not come."""
        there = {hello.rank for hello in self._came}
        return [rank for rank in range(self._own.world_size) if rank not in there]

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # gone again
        connection.setblocking(False)
        self._heard[connection] = bytearray()
        self._selector.register(connection, selectors.EVENT_READ)
        if len(self._heard) > _MOST_STRANGERS + self._own.world_size:
            # A rank that is turned away for strangers comes again.
            self._forget(next(iter(self._heard))).close()

    def _forget(self, connection: socket.socket) -> socket.socket:
        self._selector.unregister(connection)
        del self._heard[connection]
        return connection

    def _read(self, connection: socket.socket) -> None:
        """Take what was sent; a whole line is a rank, or a stranger to turn away."""
        try:
            data = connection.recv(2**16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        heard = self._heard[connection]
        heard += data
        if data and not heard.endswith(b"\n") and len(heard) < _LONGEST_MESSAGE:
            return
        hello = Hello.read(bytes(heard))
        if hello is None:
            self._forget(connection).close()
            return
        self._came.append(hello)
        self._waiting.append(self._forget(connection))

    def _answer(self, line: bytes) -> None:
        for connection in self._waiting:
            try:
                connection.settimeout(_SETTLE)
                connection.sendall(line)
            except OSError:
                continue  # it is gone, which the launcher sees

    def _layout_mistakes(self, *, missing: bool = True) -> list[str]:
        """Ranks that are missing, there twice, or of a run of another size."""
        count, by_rank = self._own.world_size, dict[int, list[Hello]]()
        for hello in self._came:
            by_rank.setdefault(hello.rank, []).append(hello)
        found = [
            f"rank {rank} is there {len(hellos)} times: "
            + "; ".join(hello.where for hello in hellos)
            for rank, hellos in sorted(by_rank.items())
            if len(hellos) > 1
        ]
        found += [
            f"rank {hello.rank} ({hello.where}) is of a run of {hello.world_size} "
            f"ranks, rank 0 of one of {count}"
            for hello in self._came
            if hello.world_size != count
        ]
        if missing and (absent := self._absent):
            verb = "is" if len(absent) == 1 else "are"
            found.insert(0, f"{listed(absent)} of {count} {verb} missing")
        return found

    def _mistake(self) -> TesseraError | None:
        found = differences({hello.rank: hello.facts for hello in self._came})
        mistakes = self._layout_mistakes()
        if not mistakes:
            return difference_error(found) if found else None
        named = [f"rank {hello.rank}: {hello.where}" for hello in self._came]
        more = f"; and {len(named) - _NAMED} more" * (len(named) > _NAMED)
        return MissingRanksError(
            f"the ranks did not meet within {self._timeout:g} s"
            if len(mistakes) == 1 and self._absent
            else "the ranks that met are not those of one run",
            got="\n".join(
                [*mistakes, *shown(found), f"there: {'; '.join(named[:_NAMED])}{more}"]
            ),
            fix="see whether each machine started its ranks, with the same number of "
            "ranks and another --node-rank (or RANK) on each\n"
            "runtime.rendezvous_timeout says how long to wait",
        )


def _busy(coordinator: Address) -> CoordinatorError | None:
    try:
        check_port(coordinator)
    except CoordinatorError as busy:
        return busy
    return None


def _visit(
    address: Address, hello: Hello, until: float, say: Callable[[str], None]
) -> str:
    """Another rank's side: say who this is, and take the answer."""
    started = time.monotonic()
    answer, refusal = _ask(address, hello, until, say)
    if answer:
        return _read_answer(answer, address)
    got = f"no rank 0 at {host_and_port(address)}: {refusal or 'no answer'}"
    host, port = address
    if _listens(coordinator := (host, port - 1)):
        got += (
            f"\nsomething listens at {host_and_port(coordinator)}, as rank 0 does "
            f"later: the run may have begun with another rank {hello.rank}"
        )
    raise MissingRanksError(
        f"rank {hello.rank} met nobody within {time.monotonic() - started:.0f} s",
        got=got,
        fix="see whether rank 0 runs, whether that is the address of its machine, and "
        "whether a firewall is between",
    )


def _ask(
    address: Address, hello: Hello, until: float, say: Callable[[str], None]
) -> tuple[bytes, OSError | None]:
    """What is answered there, asked until something is; and the last error."""
    started, told = time.monotonic(), False
    refusal: OSError | None = None
    while (now := time.monotonic()) < until:
        try:
            with socket.create_connection(address, timeout=until - now) as connection:
                connection.sendall(hello.as_line())
                if answer := _read_line(connection, until):
                    return answer, None
        except OSError as error:
            refusal = error
        if not told and now - started > _SETTLE:
            where = host_and_port(address)
            say(f"rank {hello.rank} waits for rank 0 at {where}: {refusal}")
            told = True
        time.sleep(_PAUSE)
    return b"", refusal


def _listens(address: Address) -> bool:
    try:
        socket.create_connection(address, timeout=_SETTLE).close()
    except OSError:
        return False
    return True


def _read_line(connection: socket.socket, until: float) -> bytes:
    """A whole line, or nothing where the connection ends before it."""
    heard = bytearray()
    while not heard.endswith(b"\n") and len(heard) < _LONGEST_MESSAGE:
        connection.settimeout(max(until - time.monotonic(), 0.01))
        data = connection.recv(2**16)
        if not data:
            return b""
        heard += data
    return bytes(heard)


def _read_answer(line: bytes, address: Address) -> str:
    try:
        answer = parse_json(line, longest=_LONGEST_MESSAGE)
        if answer["agreed"] is True:
            return text_of(answer["shared"])
        kind = _ERRORS[answer["code"]]
        what, got, fix = (
            printable(text_of(answer[name]), keep="\n", longest=_LONGEST_TEXT)
            for name in ("what", "got", "fix")
        )
    except (KeyError, TypeError, ValueError):
        raise CoordinatorError(
            "something else listens where rank 0 should",
            got=f"{host_and_port(address)} answered {line[:60]!r}",
            fix="use another port: --master-port, or MASTER_PORT on every machine",
        ) from None
    raise kind(what, got=got, fix=fix)


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"
