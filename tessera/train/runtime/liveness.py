# SPDX-License-Identifier: Apache-2.0
"""Ends this rank soon after another one dies, whatever this one is doing.

A collective on GPUs waits forever for a rank that died, and JAX notices a missing
heartbeat after ``runtime.heartbeat_timeout``. So every rank keeps its connection of the
rendezvous to rank 0 for the whole run. The system closes it with the process, and rank
0 tells the others who died. A machine that vanishes closes nothing: TCP's keep-alives
notice it. A process that is stopped or busy is not taken for dead.
"""

import re
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

from tessera.errors import LostRankError, TesseraError
from tessera.train.runtime.process_exit import exit_now
from tessera.train.runtime.stop_requests import StopRequests

# What a rank says before it closes its connection: that it ends in order, or that a
# rank, itself or another, has failed and may say why, or is gone.
_END: Final = "end"
_FAILED: Final = "failed"
_LOST: Final = "lost"
_MESSAGE: Final = re.compile(rf"({_FAILED}|{_LOST}) (\d{{1,9}})\n")
# Ranks often fail together, such as all of them by one mistake: each may say why.
_PATIENCE: Final = 1.0
# How long an error may wait for what explains it: collectives break as well.
_EXPLAINED: Final = 0.5
_ENDING: Final = 5.0
_MAX_LINE: Final = 200
_TICK: Final = 0.2
# Keep-alives: after a second of silence, one each second, of which three may be lost.
_KEEP_ALIVE: Final = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3}


class Liveness:
    """Watches the other ranks, from ``start`` to ``leave``.

    Args:
      rank: This rank, of a run of several.
      peers: Connections of the rendezvous, by rank: on rank 0 those of all others, on
        the others that of rank 0. ``leave`` closes them.
      stop_requests: Once a run was asked to stop, ranks end at different times.
      end: Ends this process with an error.
    """

    def __init__(
        self,
        rank: int,
        peers: Mapping[int, socket.socket],
        stop_requests: StopRequests | None = None,
        end: Callable[[TesseraError], None] | None = None,
    ) -> None:
        self._rank, self._peers = rank, peers
        self._stop_requests, self._end = stop_requests, end or _exit
        self._left, self._is_ending = threading.Event(), threading.Event()
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin to watch, in a thread."""
        selector = selectors.DefaultSelector()
        for rank, connection in self._peers.items():
            _keep_alive(connection)
            selector.register(connection, selectors.EVENT_READ, rank)
        threading.Thread(
            target=self._watch, args=(selector,), name="liveness", daemon=True
        ).start()

    def leave(self) -> None:
        """Stop watching; the others know that this rank ends in order."""
        self._left.set()
        self._tell(_END)
        with self._lock:
            for connection in self._peers.values():
                connection.close()

    def fail(self) -> None:
        """Let the others end a second later; from any thread."""
        if not (self._left.is_set() or self._is_ending.is_set()):
            self._left.set()
            self._tell(f"{_FAILED} {self._rank}")

    def wait_for_loss(self) -> None:
        """After an error: wait a moment, in case that another rank's death explains it.

        The process then ends here.
        """
        if self._is_ending.wait(_EXPLAINED):
            time.sleep(_ENDING)

    @property
    def _is_stopping(self) -> bool:
        return self._stop_requests is not None and self._stop_requests.is_requested

    def _tell(self, line: str) -> None:
        with self._lock:
            for connection in self._peers.values():
                with suppress(OSError):
                    connection.sendall(f"{line}\n".encode())

    def _watch(self, selector: selectors.BaseSelector) -> None:
        """See which connection ends, and what was said before."""
        with selector:
            while selector.get_map() and not self._left.is_set():
                for key, _ in selector.select(_TICK):
                    selector.unregister(key.fileobj)
                    self._read(key.data)

    def _read(self, rank: int) -> None:
        line = ""
        with suppress(OSError):
            line = self._peers[rank].recv(_MAX_LINE).decode(errors="replace")
        if line.startswith(_END):
            return
        message = _MESSAGE.match(line)
        if message is None:
            self._lose(_LOST, rank)
        else:
            self._lose(message[1], int(message[2]))

    def _lose(self, word: str, rank: int) -> None:
        """End this process, unless it is ending already."""
        if self._left.is_set() or self._is_stopping:
            return
        if self._rank == 0:
            self._tell(f"{word} {rank}")
        patience = _PATIENCE if word == _FAILED else 0.0
        if self._left.wait(patience) or self._is_stopping or self._is_ending.is_set():
            return
        self._is_ending.set()
        self._end(
            LostRankError(
                f"rank {rank} is gone, and rank {self._rank} ends with it",
                got="its connection was closed before the end of the run",
                fix=f"the output of rank {rank} says why, unless it was killed, as for "
                "lack of memory, or its machine is gone; the same command with "
                "training.resume=auto continues the run",
            )
        )


def _keep_alive(connection: socket.socket) -> None:
    """Let the system see that the other machine is gone."""
    connection.settimeout(_TICK)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):  # Linux's names
            option = getattr(socket, name)
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _exit(error: TesseraError) -> None:
    exit_now(error.exit_code, f"{error}\n")
