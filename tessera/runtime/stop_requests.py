# SPDX-License-Identifier: Apache-2.0
"""A run that is asked to end, by a scheduler or a person: all ranks at the same place.

    with Stopping(grace=25.0) as stopping:
        for batch in batches:
            if not stopping.goes_on():
                break                        # save, and leave
            ...                              # a step, in which all ranks take part

Signals come to a thread: a handler in Python waits for the main thread, which may be in
a compiler for minutes. What all ranks do together begins at points that each counts
alike. A rank that is asked to end writes how many it has begun on the run's board, the
others do the same, and the highest number is the last that any of them begins.
"""

import logging
import os
import re
import select
import signal
import threading
import time
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Final, Protocol

from tessera.runtime import exit_codes
from tessera.runtime.exit_codes import ASKS
from tessera.runtime.process_exit import Deadline, leave

_log: Final = logging.getLogger("tessera.runtime")
_TICK: Final = 0.1
_LOOK_EVERY: Final = 0.5
# A scheduler that signals the launcher and its ranks is heard twice.
_ECHO: Final = 1.0
_LAST_RANK: Final = 2.0
# How much longer than its grace period a process may take whose threads do not run.
_LAST_RESORT: Final = 3.0
_REQUEST: Final = re.compile(r"(\d{1,3}) (\d{1,15})")
_ASKED: Final = "tessera/stop"
_GONE: Final = "tessera/gone"


class Board(Protocol):
    """Texts that all ranks read."""

    def put(self, key: str, text: str) -> None:
        """Write one."""

    def texts(self, folder: str) -> dict[str, str]:
        """Those below a folder, by what their keys have after it."""
        ...


class Stopping:
    """Whether the run goes on; a context in which signals only ask for its end.

    A second signal ends the process at once. So does the first where no point has
    begun on any rank, for then there is nothing to save.

    Args:
      grace: Seconds from SIGTERM to the end of the process, saved or not. Ctrl-C leaves
        as long as it takes.
      rank: This process's number.
    """

    def __init__(self, grace: float, *, rank: int = 0) -> None:
        self._grace, self._rank, self._count = grace, rank, 1
        self._board: Board | None = None
        self._changed = threading.Condition()
        self._points = 0
        self._asked: signal.Signals | None = None
        self._last: int | None = None
        self._stopped = False
        self._asked_at = self._looked_at = 0.0
        self._end_by = float("inf")
        self._deadline, self._outlives = Deadline(), False
        self._handlers: dict[signal.Signals, Any] = {}
        self._closed = threading.Event()

    def connect(self, board: Board, count: int) -> None:
        """Agree with others from now on.

        Args:
          board: Of the run.
          count: Ranks of the run.
        """
        self._count, self._board = count, board

    def goes_on(self) -> bool:
        """Whether to begin what comes next, which all ranks do; else save, and leave.

        Each rank calls it in the same places. It may wait while they agree.
        """
        with self._changed:
            while self._asked is not None and self._last is None:
                self._changed.wait()
            if self._last is not None and self._points >= self._last:
                self._stopped = True
                return False
            self._points += 1
            return True

    @property
    def exit_code(self) -> int | None:
        """What the process is to exit with, where it was stopped; else None."""
        return ASKS[self._asked] if self._stopped and self._asked else None

    def keep_deadline(self) -> None:
        """Let the grace period hold after the context too, until the process ends."""
        self._outlives = True
        if self._asked is not None and self._end_by != float("inf"):
            left = max(self._end_by - time.monotonic(), 0.0)
            self._deadline.set(left, ASKS[self._asked])

    def __enter__(self) -> "Stopping":
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        if threading.current_thread() is threading.main_thread():
            self._handlers = {
                number: signal.signal(number, _nothing)
                for number in ASKS
                if signal.getsignal(number) is not signal.SIG_IGN
            }
            self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            os.register_at_fork(after_in_child=self._forget)
        self._thread = threading.Thread(
            target=self._watch, name="stopping", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closed.set()
        if not self._outlives:
            self._deadline.clear()
        handlers = self._handlers.copy()
        self._handlers.clear()
        if handlers:
            signal.set_wakeup_fd(self._wakeup)
            for number, handler in handlers.items():
                signal.signal(number, handler)
        # It may wait for a board that nobody answers for any more.
        self._thread.join(2 * _TICK)
        if not self._thread.is_alive():
            os.close(self._read)
            os.close(self._write)

    def _forget(self) -> None:
        """In a child that was forked: its signals are not this process's."""
        if self._handlers:
            signal.set_wakeup_fd(-1)
            for number in self._handlers:
                signal.signal(number, signal.SIG_DFL)

    def _watch(self) -> None:
        while not self._closed.is_set():
            if select.select([self._read], [], [], _TICK)[0]:
                for number in os.read(self._read, 64):
                    if number in self._handlers:
                        self._take(signal.Signals(number))
            if self._last is None:
                self._agree()
            if time.monotonic() > self._end_by:
                self._leave(f"rank {self._rank} did not end in {self._grace:g} s")

    def _take(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self._asked_at:
            again = ASKS[number] == exit_codes.REQUEUE
            if again and now - self._asked_at < _ECHO:
                return
            leave(
                exit_codes.exit_code_of(-number),
                f"a second signal, {number.name}: rank {self._rank} ends at once\n",
            )
        self._asked_at = now
        self._ask(number)
        limit = f", in {self._grace:g} s" * (ASKS[number] == exit_codes.REQUEUE)
        _log.warning(
            "%s: the run is to save and end%s; a second one ends it at once",
            *(number.name, limit),
        )

    def _ask(self, number: signal.Signals) -> None:
        with self._changed:
            if self._asked is None or ASKS[self._asked] == exit_codes.INTERRUPTED:
                self._asked = number
        if ASKS[number] == exit_codes.REQUEUE and self._end_by == float("inf"):
            self._end_by = time.monotonic() + self._grace
            self._deadline.set(self._grace + _LAST_RESORT, ASKS[number])

    def _agree(self) -> None:
        """Bring about which point is the last, once a rank is asked to end."""
        requests = self._requests()
        if self._asked is None and requests and self._rank == 0:
            said = min(requests)
            _log.warning("the run is to save and end: rank %s is asked to", said)
        for number, _ in requests.values():
            self._ask(number)
        if self._asked is None:
            return
        if self._rank not in requests:
            # No point begins from here on until the last one is known.
            with self._changed:
                requests[self._rank] = self._asked, self._points
            self._put(_ASKED, f"{self._asked.value} {requests[self._rank][1]}")
        if len(requests) < self._count:
            return
        last = max(points for _, points in requests.values())
        if not last:
            self._leave("nothing is to be saved before the first step")
        with self._changed:
            self._last = last
            self._changed.notify_all()

    def _requests(self) -> dict[int, tuple[signal.Signals, int]]:
        """What each rank was asked that was, and how many points it had begun.

        The board is open to whoever connects: what is not of this form does not count.
        """
        asks = {number.value: number for number in ASKS}
        found: dict[int, tuple[signal.Signals, int]] = {}
        for rank, text in self._said(_ASKED).items():
            request = _REQUEST.fullmatch(text)
            is_rank = rank.isdecimal() and len(rank) < 10 and int(rank) < self._count
            if is_rank and request and int(request[1]) in asks:
                found[int(rank)] = asks[int(request[1])], int(request[2])
        return found

    def _leave(self, why: str) -> None:
        """End this process from outside of its main thread."""
        assert self._asked is not None
        self._put(_GONE, "gone")
        # With the first rank goes the coordinator, and JAX aborts those that are left.
        until = time.monotonic() + _LAST_RANK * (self._rank == 0)
        while time.monotonic() < until and 0 < len(self._said(_GONE)) < self._count:
            time.sleep(_TICK)
        leave(ASKS[self._asked], f"{self._asked.name}: {why}\n")

    def _said(self, folder: str) -> dict[str, str]:
        if self._board is None:
            return {}
        now = time.monotonic()
        if self._asked is None and now - self._looked_at < _LOOK_EVERY:
            return {}
        self._looked_at = now
        try:
            return self._board.texts(folder)
        except Exception:  # of the connection, at the end of the run or of others
            self._board = None
            return {}

    def _put(self, folder: str, text: str) -> None:
        if self._board is not None:
            with suppress(Exception):
                self._board.put(f"{folder}/{self._rank}", text)


def _nothing(number: int, frame: FrameType | None) -> None:
    """What a signal does in the main thread."""
