# SPDX-License-Identifier: Apache-2.0
"""The rendezvous of a run's ranks, in plain Python: they compare what they are.

Rank 0 listens. Every other rank sends a handshake, one line of JSON with its rank and
its fingerprint, and waits for the answer, which is the same for all: they agree, or the
error that each of them raises. Without the one before JAX connects the ranks, JAX would
abort the process without naming the missing rank, or start a run whose parts differ.
The connections stay open, and ``Liveness`` watches them.

Whatever a peer sends, it ends no process: a line has a maximum length, is parsed
strictly, and is shown without its escape sequences. The connection is neither encrypted
nor authenticated, like that of JAX's own coordinator: a firewall has to protect both.
"""

import errno
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from tessera.errors import (
    CoordinatorError,
    FolderInUseError,
    MissingRanksError,
    OutputPathError,
    RanksDifferError,
    TesseraError,
    printable,
)
from tessera.train.files.untrusted_json import (
    Count,
    count_of,
    decode_json,
    parse_json,
    text_of,
)
from tessera.train.runtime.addresses import host_and_port, listen, wait_for_host
from tessera.train.runtime.cluster import Address, Cluster
from tessera.train.runtime.rank_consistency import (
    Fingerprint,
    difference_error,
    differences,
    format_differences,
    format_ranks,
)

START: Final = "start"
"""The topic of the first rendezvous, before JAX connects the ranks."""

_PROTOCOL: Final = 3
# A handshake has about 30 KiB: the configuration, and a hash of each file.
_MAX_MESSAGE: Final = 4 * 2**20
_MAX_TEXT: Final = 16 * 2**10
_MAX_NAME: Final = 200
_MAX_RANKS: Final = 2**20
# Connections that have not sent a line yet, beyond one for each rank, and how long one
# may be silent.
_MAX_STRANGERS: Final = 64
_MAX_SILENCE: Final = 10.0
# After the first mistake, how long rank 0 waits for others, to name them as well.
_SETTLE: Final = 3.0
# How much longer than rank 0 the others wait, so that its answer reaches them.
_EXTRA_WAIT: Final = 10.0
_RETRY_EVERY: Final = 0.2
_TICK: Final = 0.05
_MAX_NAMED: Final = 16
_ERRORS: Final = {
    kind.code: kind
    for kind in (
        CoordinatorError,
        MissingRanksError,
        RanksDifferError,
        FolderInUseError,
        OutputPathError,
    )
}


@dataclass(frozen=True)
class Handshake:
    """What a rank sends to rank 0.

    Attributes:
      rank: Its number.
      world_size: The number of ranks that it expects.
      topic: What the ranks compare.
      process: ``"host, process 1234"``.
      fingerprint: What has to be the same on every rank.
    """

    rank: Count
    world_size: Count
    topic: str
    process: str
    fingerprint: Fingerprint

    @classmethod
    def of(cls, cluster: Cluster, topic: str, fingerprint: Fingerprint) -> Self:
        """The handshake of this process."""
        process = f"{socket.gethostname()}, process {os.getpid()}"
        return cls(cluster.rank, cluster.world_size, topic, process, fingerprint)

    def as_line(self) -> bytes:
        """One line of JSON."""
        return _line({"tessera": _PROTOCOL, **vars(self)})

    @classmethod
    def read(cls, line: bytes) -> Self | None:
        """Parse a line; None if it is no handshake."""
        try:
            values = parse_json(line, longest=_MAX_MESSAGE)
            if count_of(values["tessera"]) != _PROTOCOL:
                return None
            read = decode_json(cls, values)
        except (ValueError, KeyError, TypeError):
            return None
        process = printable(read.process, longest=_MAX_NAME)
        exists = read.rank < read.world_size <= _MAX_RANKS
        return replace(read, process=process) if exists else None


def rendezvous(
    cluster: Cluster,
    fingerprint: Fingerprint,
    refusal: TesseraError | None = None,
    *,
    topic: str = START,
    timeout: float,
    shared: str = "",
    report: Callable[[str], None],
) -> tuple[str, dict[int, socket.socket]]:
    """Wait for all ranks, and check that they belong to one run.

    Args:
      cluster: This rank.
      fingerprint: What has to be the same on every rank.
      refusal: On rank 0: why there is no run; all ranks raise it.
      topic: What they compare, in the same order on all ranks.
      timeout: Seconds after which absent ranks count as missing.
      shared: On rank 0: the text that all ranks receive.
      report: Shows a line to the person who waits.

    Returns:
      What rank 0 shares, and the open connections, by rank: on rank 0 those to all
      others, on the others that to rank 0.

    Raises:
      CoordinatorError: [T705] rank 0's address is not known or its ports are busy.
      MissingRanksError: [T706] ranks are missing, duplicated, or of another run.
      RanksDifferError: [T707] their fingerprints differ.
      TesseraError: What rank 0 passed as ``refusal``.
    """
    assert cluster.coordinator is not None, "a single process has no rendezvous"
    host, port = cluster.coordinator
    handshake = Handshake.of(cluster, topic, fingerprint)
    until = time.monotonic() + timeout
    wait_for_host(host, until, report)
    address = host, port + 1
    if cluster.rank:
        return _join(address, handshake, until + _EXTRA_WAIT, report)
    try:
        listener = listen(address)
    except CoordinatorError as busy:
        # Another rank 0 may be listening, which then reports what is wrong.
        with suppress(OSError):
            until = time.monotonic() + 2 * _SETTLE
            answer, connection = _ask(address, handshake, until, report)
            connection.close()
            if answer.startswith(b'{"agreed"'):
                _read_answer(answer, address)
        raise busy from None
    # JAX's coordinator does not listen yet, so its port has to be free.
    coordinator = cluster.coordinator if topic == START else None
    with listener:
        return _Host(listener, handshake, timeout).run(coordinator, shared, refusal)


class _Host:
    """Rank 0's side: collects the handshakes, and answers them."""

    def __init__(self, listener: socket.socket, own: Handshake, timeout: float) -> None:
        self._own, self._timeout, self._listener = own, timeout, listener
        self._listener.settimeout(_TICK)
        self._handshakes: list[Handshake] = [own]
        # Connections without a whole line so far, and those that wait for the answer.
        self._unread: list[socket.socket] = []
        self._waiting: list[socket.socket] = []
        self._lock, self._is_closed = threading.Lock(), False

    def run(
        self, coordinator: Address | None, shared: str, refusal: TesseraError | None
    ) -> tuple[str, dict[int, socket.socket]]:
        """Receive all handshakes, and give every rank the same answer."""
        try:
            self._receive(coordinator)
            with self._lock:
                self._is_closed = True  # who comes later gets no answer
            error = refusal or _busy(coordinator) or self._mistake()
            answer: dict[str, Any] = {"agreed": error is None, "shared": shared}
            if error is not None:
                answer |= {"code": error.code, "what": error.what}
                answer |= {"got": error.got, "fix": error.fix}
            self._answer(_line(answer))
            if error is not None:
                raise error
            ranks = [each.rank for each in self._handshakes[1:]]
            peers = dict(zip(ranks, self._waiting, strict=True))
            self._waiting.clear()
            return shared, peers
        finally:
            with self._lock:
                for connection in (*self._unread, *self._waiting):
                    _close(connection)

    def _receive(self, coordinator: Address | None) -> None:
        started = time.monotonic()
        if _busy(coordinator):
            # Mostly by this run, started before; or by one that is about to end.
            self._receive_until(started + min(_SETTLE, self._timeout))
            if _busy(coordinator):
                return
        self._receive_until(started + self._timeout)

    def _receive_until(self, until: float) -> None:
        while self._absent and time.monotonic() < until:
            with suppress(OSError):  # nobody came, or is gone already
                self._accept()
            if self._layout_mistakes(missing=False):
                until = min(until, time.monotonic() + _SETTLE)

    @property
    def _absent(self) -> list[int]:
        """The ranks without a handshake."""
        present = {handshake.rank for handshake in self._handshakes}
        return [rank for rank in range(self._own.world_size) if rank not in present]

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(_MAX_SILENCE)
        with self._lock:
            self._unread.append(connection)
            if len(self._unread) > _MAX_STRANGERS + self._own.world_size:
                # A rank that is closed here connects again.
                _close(self._unread.pop(0))
        threading.Thread(target=self._read, args=(connection,), daemon=True).start()

    def _read(self, connection: socket.socket) -> None:
        """Read a line, which is a handshake for this rendezvous, or a stranger's."""
        line = b""
        with suppress(OSError):
            line = _read_line(connection)
        handshake = Handshake.read(line)
        with self._lock:
            if connection in self._unread:
                self._unread.remove(connection)
            is_ours = handshake is not None and handshake.topic == self._own.topic
            if handshake is None or not is_ours or self._is_closed:
                _close(connection)
            else:
                # In this order: the answer follows the last handshake.
                self._waiting.append(connection)
                self._handshakes.append(handshake)

    def _answer(self, line: bytes) -> None:
        for connection in self._waiting:
            with suppress(OSError):  # that rank is gone, which its launcher sees
                connection.settimeout(_SETTLE)
                connection.sendall(line)

    def _layout_mistakes(self, *, missing: bool = True) -> list[str]:
        """Ranks that are missing, there twice, or of a run of another size."""
        count, by_rank = self._own.world_size, dict[int, list[Handshake]]()
        for each in self._handshakes:
            by_rank.setdefault(each.rank, []).append(each)
        mistakes = [
            f"rank {rank} is there {len(group)} times: "
            + "; ".join(each.process for each in group)
            for rank, group in sorted(by_rank.items())
            if len(group) > 1
        ]
        mistakes += [
            f"rank {each.rank} ({each.process}) is of a run of {each.world_size} "
            f"ranks, rank 0 of one of {count}"
            for each in self._handshakes
            if each.world_size != count
        ]
        if missing and (absent := self._absent):
            verb = "is" if len(absent) == 1 else "are"
            mistakes.insert(0, f"{format_ranks(absent)} of {count} {verb} missing")
        return mistakes

    def _mistake(self) -> TesseraError | None:
        found = differences({each.rank: each.fingerprint for each in self._handshakes})
        mistakes = self._layout_mistakes()
        if not mistakes:
            return difference_error(found) if found else None
        named = [f"rank {each.rank}: {each.process}" for each in self._handshakes]
        more = (
            f"; and {len(named) - _MAX_NAMED} more" if len(named) > _MAX_NAMED else ""
        )
        present = f"there: {'; '.join(named[:_MAX_NAMED])}{more}"
        what = f"the ranks did not meet within {self._timeout:g} s"
        if self._own.topic != START:
            what += f" to compare: {self._own.topic}"
        if len(mistakes) > 1 or not self._absent:
            what = "the ranks that met are not those of one run"
        return MissingRanksError(
            what,
            got="\n".join([*mistakes, *format_differences(found), present]),
            fix="see whether each machine started its ranks, with the same WORLD_SIZE "
            "and another RANK each\n"
            "runtime.rendezvous_timeout says how long to wait",
        )


def _busy(coordinator: Address | None) -> CoordinatorError | None:
    """Why JAX's coordinator could not listen; None if it can."""
    try:
        if coordinator is not None:
            listen(coordinator).close()
    except CoordinatorError as busy:
        return busy
    return None


def _join(
    address: Address, handshake: Handshake, until: float, report: Callable[[str], None]
) -> tuple[str, dict[int, socket.socket]]:
    """The other ranks' side: send the handshake, and return the answer."""
    started = time.monotonic()
    try:
        answer, connection = _ask(address, handshake, until, report)
    except OSError as error:
        seconds = time.monotonic() - started
        raise MissingRanksError(
            f"rank {handshake.rank} met nobody within {seconds:.0f} s",
            got=f"no rank 0 at {host_and_port(address)}: {error}",
            fix="see whether rank 0 runs, whether that is the address of its machine, "
            "whether a firewall is between, and whether the run has begun with another "
            f"rank {handshake.rank}",
        ) from None
    with connection:
        return _read_answer(answer, address), {0: connection.dup()}


def _ask(
    address: Address, handshake: Handshake, until: float, report: Callable[[str], None]
) -> tuple[bytes, socket.socket]:
    """Connect until there is an answer; the answer, and the open connection.

    Raises:
      OSError: The last error, where there is none in time.
    """
    started, is_reported = time.monotonic(), False
    failure = OSError("no answer")
    while (now := time.monotonic()) < until:
        try:
            with _connect(address, until - now) as connection:
                connection.sendall(handshake.as_line())
                # Unbuffered: what rank 0 sends after the answer is for others to read.
                if answer := _read_line(connection, buffering=0):
                    return answer, connection.dup()
        except OSError as error:
            failure = error
        if not is_reported and now - started > _SETTLE:
            place = host_and_port(address)
            report(f"rank {handshake.rank} waits for rank 0 at {place}: {failure}")
            is_reported = True
        time.sleep(_RETRY_EVERY)
    raise failure


def _connect(address: Address, timeout: float) -> socket.socket:
    """Connect to rank 0.

    Raises:
      OSError: Nobody listens. On one machine, where the system may choose the port of
        rank 0 as the connection's own, TCP then connects a socket to itself.
    """
    connection = socket.create_connection(address, timeout=timeout)
    if connection.getsockname() == connection.getpeername():
        connection.close()
        raise ConnectionRefusedError(
            errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED)
        )
    return connection


def _read_line(connection: socket.socket, buffering: int = -1) -> bytes:
    """A whole line, or nothing if the connection ends before it."""
    with connection.makefile("rb", buffering) as stream:
        line = stream.readline(_MAX_MESSAGE)
    return line if line.endswith(b"\n") else b""


def _close(connection: socket.socket) -> None:
    """Close a connection, also if another thread reads from it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def _read_answer(line: bytes, address: Address) -> str:
    """What rank 0 shares; raises the error that it answered instead."""
    try:
        answer = parse_json(line, longest=_MAX_MESSAGE)
        if answer["agreed"] is True:
            return text_of(answer["shared"])
        kind = _ERRORS[answer["code"]]
        what, got, fix = (
            printable(text_of(answer[name]), keep="\n", longest=_MAX_TEXT)
            for name in ("what", "got", "fix")
        )
    except (KeyError, TypeError, ValueError):
        raise CoordinatorError(
            "something else listens where rank 0 should",
            got=f"{host_and_port(address)} answered {line[:60]!r}",
            fix="use another port: MASTER_PORT on every machine",
        ) from None
    raise kind(what, got=got, fix=fix)


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"
