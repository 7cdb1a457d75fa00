# SPDX-License-Identifier: Apache-2.0
"""Ends this rank soon after another one dies, whatever this one is doing.

A collective on GPUs waits forever for a rank that died, and JAX notices a missing
heartbeat after ``runtime.heartbeat_timeout``. So every rank keeps a TCP connection to
rank 0 for the whole run. The system closes it with the process, and rank 0 tells the
others who died. A machine that vanishes closes nothing: TCP's keep-alives notice it.

The address of rank 0 and a token, by which it tells ranks from strangers, are in the
run's key-value store.
"""

import logging
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import BinaryIO, Final

from tessera._jax_processes import Board
from tessera.errors import CoordinatorError, LostRankError, TesseraError
from tessera.runtime.addresses import listen
from tessera.runtime.cluster import Cluster
from tessera.runtime.process_exit import exit_now

_log: Final = logging.getLogger("tessera.runtime")
_ADDRESS: Final = "tessera/liveness"
# What a rank says before it closes its connection: whether it ends in order.
_END: Final = "end"
_FAILED: Final = "failed"
# What rank 0 says: that it watches this rank, and which other is lost, how many seconds
# after which this one ends.
_WATCHED: Final = "watched"
_LOST: Final = "lost"
# Ranks often fail together, such as all of them by one mistake: each may say why.
_PATIENCE: Final = 1.0
# How long an error may wait for what explains it: collectives break as well.
_EXPLAINED: Final = 0.5
_ENDING: Final = 5.0
_MAX_LINE: Final = 200
_MAX_STRANGERS: Final = 64
_TICK: Final = 0.2
_CONNECT_TIMEOUT: Final = 30.0
# Keep-alives: after a second of silence, one each second, of which three may be lost.
_KEEP_ALIVE: Final = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3}


class Liveness:
    """Watches the other ranks, from ``start`` to ``leave``.

    Args:
      cluster: This rank, of a run of several.
      board: The run's key-value store.
      is_stopping: Whether the run was asked to stop: ranks then end at different times.
      end: Ends this process with an error.
    """

    def __init__(
        self,
        cluster: Cluster,
        board: Board,
        is_stopping: Callable[[], bool],
        end: Callable[[TesseraError], None] | None = None,
    ) -> None:
        self._cluster, self._board = cluster, board
        self._is_stopping, self._end = is_stopping, end or _exit
        self._left, self._is_ending = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        # Of the other ranks on rank 0; of rank 0 on the others.
        self._peers: dict[int, socket.socket] = {}

    def start(self) -> None:
        """Begin to watch, in a thread; waits until the ranks are connected."""
        threading.Thread(target=self._watch, name="liveness", daemon=True).start()
        wanted = 1 if self._cluster.rank else self._cluster.world_size - 1
        until = time.monotonic() + _CONNECT_TIMEOUT
        while len(self._peers) < wanted:
            if time.monotonic() > until:
                _log.warning("a rank that dies is noticed late: not all are connected")
                return
            time.sleep(_TICK / 10)

    def _watch(self) -> None:
        try:
            (self._join if self._cluster.rank else self._host)()
        finally:
            with self._lock:
                for connection in self._peers.values():
                    connection.close()

    def leave(self) -> None:
        """Stop watching; the others know that this rank ends in order."""
        self._left.set()
        self._tell(_END)

    def fail(self) -> None:
        """Let the others end a second later; from any thread."""
        if not (self._left.is_set() or self._is_ending.is_set()):
            self._left.set()
            self._tell(_FAILED if self._cluster.rank else f"{_LOST} 0 {_PATIENCE}")

    def wait_for_loss(self) -> None:
        """After an error: wait a moment, in case that another rank's death explains it.

        The process then ends here.
        """
        if self._is_ending.wait(_EXPLAINED):
            time.sleep(_ENDING)

    def _tell(self, line: str) -> None:
        with self._lock:
            for connection in self._peers.values():
                with suppress(OSError):
                    connection.sendall(f"{line}\n".encode())

    def _lose(self, rank: int, patience: float = 0.0) -> None:
        """End this process, unless it is ending already."""
        if not (self._left.is_set() or self._is_stopping() or self._cluster.rank):
            self._tell(f"{_LOST} {rank} {patience}")
        if self._left.wait(patience) or self._is_stopping() or self._is_ending.is_set():
            return
        self._is_ending.set()
        own = self._cluster.rank
        self._end(
            LostRankError(
                f"rank {rank} is gone, and rank {own} ends with it",
                got="its connection was closed before the end of the run",
                fix=f"the output of rank {rank} says why, unless it was killed, as for "
                "lack of memory, or its machine is gone; the same command with "
                "training.resume=auto continues the run",
            )
        )

    def _join(self) -> None:
        """The other ranks' side: keep a connection to rank 0, and read from it."""
        stream = self._connect()
        if stream is None:
            return
        with stream, suppress(OSError):
            while words := stream.readline(_MAX_LINE).decode(errors="replace").split():
                if words[0] == _END:
                    return
                if words[0] == _LOST:
                    self._lose(int(words[1]), float(words[2]))
                    return
        self._lose(0)

    def _connect(self) -> BinaryIO | None:
        """What rank 0 says, once it watches this rank; None where it does not."""
        host = (self._cluster.coordinator or ("", 0))[0]
        until = time.monotonic() + _CONNECT_TIMEOUT
        while time.monotonic() < until and not self._left.is_set():
            with suppress(Exception):  # the store is not there yet, or not any more
                port, token = self._board.texts(_ADDRESS)["0"].split()
                connection = socket.create_connection((host, int(port)), timeout=5)
                connection.settimeout(None)
                _keep_alive(connection)
                connection.sendall(f"{token} {self._cluster.rank}\n".encode())
                stream = connection.makefile("rb")
                if stream.readline(_MAX_LINE).split() == [_WATCHED.encode()]:
                    self._peers[0] = connection
                    if self._left.is_set():
                        self._tell(_END)
                    return stream
                stream.close()
                connection.close()
            time.sleep(_TICK)
        return None

    def _host(self) -> None:
        """Rank 0's side: accept the others, and see which connection ends."""
        host = (self._cluster.coordinator or ("", 0))[0]
        token = secrets.token_hex(16)
        try:
            listener = listen((host, 0))
        except CoordinatorError as error:
            _log.warning("the other ranks cannot connect: %s", error.got)
            return
        with (
            listener,
            selectors.DefaultSelector() as selector,
            ExitStack() as closing,
            suppress(OSError),
        ):
            with suppress(Exception):  # the run has ended already
                self._board.put(f"{_ADDRESS}/0", f"{listener.getsockname()[1]} {token}")
            listener.setblocking(False)
            selector.register(listener, selectors.EVENT_READ)
            strangers: list[socket.socket] = []
            closing.callback(lambda: [each.close() for each in strangers])
            while not self._left.is_set():
                for key, _ in selector.select(_TICK):
                    if key.data is not None:
                        self._read(key.data, token, strangers, selector)
                        continue
                    with suppress(OSError):
                        connection, _ = listener.accept()
                        connection.setblocking(False)
                        _keep_alive(connection)
                        selector.register(connection, selectors.EVENT_READ, connection)
                        strangers.append(connection)
                        if len(strangers) > _MAX_STRANGERS + self._cluster.world_size:
                            _drop(strangers.pop(0), selector)

    def _read(
        self,
        connection: socket.socket,
        token: str,
        strangers: list[socket.socket],
        selector: selectors.BaseSelector,
    ) -> None:
        """Read what a rank, or a stranger, sent, or that its connection ended."""
        line = ""
        with suppress(OSError):
            line = connection.recv(_MAX_LINE).decode(errors="replace")
        ranks = {peer: rank for rank, peer in self._peers.items()}
        if connection in ranks:
            _drop(connection, selector)
            with self._lock:
                del self._peers[ranks[connection]]
            if _END not in line.split():
                is_killed = _FAILED not in line.split()
                self._lose(ranks[connection], 0.0 if is_killed else _PATIENCE)
            return
        strangers.remove(connection)
        words = line.split()
        is_rank = len(words) >= 2 and secrets.compare_digest(
            words[0].encode(), token.encode()
        )
        if not (is_rank and line.endswith("\n") and words[1].isdecimal()):
            _drop(connection, selector)  # a rank connects again
            return
        with suppress(OSError):
            connection.sendall(f"{_WATCHED}\n".encode())
        with self._lock:
            self._peers[int(words[1])] = connection


def _drop(connection: socket.socket, selector: selectors.BaseSelector) -> None:
    selector.unregister(connection)
    connection.close()


def _keep_alive(connection: socket.socket) -> None:
    """Let the system see that the other machine is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):  # Linux's names
            option = getattr(socket, name)
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _exit(error: TesseraError) -> None:
    exit_now(error.exit_code, f"{error}\n")
