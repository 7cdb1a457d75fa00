# SPDX-License-Identifier: Apache-2.0
"""Stops a run on request: all ranks after the same step.

Requests are signals of a scheduler or a person, or come from inside of the process.

    with StopRequests(grace=25.0) as stop_requests:
        for batch in batches:
            if not stop_requests.should_continue():
                break                        # save, and exit
            ...                              # a step, in which all ranks take part

A thread receives the signals, because a Python handler waits for the main thread, which
may be in a compiler for minutes. All ranks count their calls of ``should_continue``
alike. A rank that is asked to stop writes its count to the run's key-value store, the
others do the same, and the highest count is the last step that any of them begins.

JAX has such an agreement, ``reached_preemption_sync_point``, for SIGTERM alone: it has
no grace period, no second signal, and no answer for a run that has not begun a step.
"""

import logging
import os
import re
import select
import signal
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any, Final

from tessera.jax_compat.processes import Board
from tessera.train.runtime import exit_codes
from tessera.train.runtime.exit_codes import STOP_SIGNALS
from tessera.train.runtime.process_exit import Deadline, exit_now

_log: Final = logging.getLogger("tessera.train.runtime")
_TICK: Final = 0.1
_READ_EVERY: Final = 0.5
# A scheduler that signals the launcher and its ranks reaches each rank twice.
_ECHO: Final = 1.0
_COORDINATOR_WAIT: Final = 2.0
# How much longer than its grace period a process may take whose threads do not run.
_LAST_RESORT: Final = 3.0
_REQUEST: Final = re.compile(r"(\d{1,3}) (\d{1,15})")
_REQUESTS: Final = "tessera/stop"
_GONE: Final = "tessera/gone"


class StopRequests:
    """Turns signals into requests to stop, for the length of a ``with`` block.

    A second signal ends the process at once. So does the first if no rank has begun a
    step, because there is nothing to save. A request from inside is no signal: the
    first signal after it, by which a cloud that takes the machine away ends what runs
    there, changes nothing.

    Args:
      grace: Seconds from SIGTERM to the end of the process, saved or not. Ctrl-C has no
        limit.
      rank: This process's number.
    """

    def __init__(self, grace: float, *, rank: int = 0) -> None:
        self._grace, self._rank, self._count = grace, rank, 1
        self._board: Board | None = None
        self._changed = threading.Condition()
        self._steps = 0
        self._requested: signal.Signals | None = None
        self._cause = ""
        self._last_step: int | None = None
        self._is_stopped = self._is_saved = False
        self._requested_at = self._read_at = 0.0
        self._end_by = float("inf")
        self._deadline, self._keeps_deadline = Deadline(), False
        self._handlers: dict[signal.Signals, Any] = {}
        self._closed = threading.Event()

    def connect(self, board: Board, count: int) -> None:
        """Agree with the other ranks from now on.

        Args:
          board: The run's key-value store.
          count: Ranks of the run.
        """
        self._count, self._board = count, board

    def should_continue(self) -> bool:
        """Whether to begin the next step, as all ranks do; if not, save and exit.

        Each rank calls it at the same points. It may wait while the ranks agree.
        """
        with self._changed:
            while self._requested is not None and self._last_step is None:
                self._changed.wait()
            if self._last_step is not None and self._steps >= self._last_step:
                self._is_stopped = True
                return False
            self._steps += 1
            return True

    def request(self, cause: str) -> None:
        """Stop the run as SIGTERM does. From any thread; a second request is ignored.

        Args:
          cause: Why, for the log.
        """
        with self._changed:
            if self._requested is None:
                self._cause = self._cause or cause

    @property
    def is_requested(self) -> bool:
        """Whether this rank or another was asked to stop, as far as this one knows."""
        return self._requested is not None

    @property
    def exit_code(self) -> int | None:
        """The code to exit with if the run was stopped; else None."""
        if not self._is_stopped or self._requested is None:
            return None
        return STOP_SIGNALS[self._requested]

    def mark_saved(self) -> None:
        """Say that a stopped run has saved: another signal has its exit code, too.

        A scheduler may signal the ranks that are left as soon as one has ended.
        """
        self._is_saved = True

    def keep_deadline(self) -> None:
        """Enforce the grace period beyond the block, until the process ends."""
        self._keeps_deadline = True
        if self._requested is not None and self._end_by != float("inf"):
            left = max(self._end_by - time.monotonic(), 0.0)
            self._deadline.set(left, STOP_SIGNALS[self._requested])

    def __enter__(self) -> "StopRequests":
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        if threading.current_thread() is threading.main_thread():
            self._handlers = {
                number: signal.signal(number, _ignore)
                for number in STOP_SIGNALS
                if signal.getsignal(number) is not signal.SIG_IGN
            }
            self._wakeup = signal.set_wakeup_fd(
                self._write_end, warn_on_full_buffer=False
            )
            os.register_at_fork(after_in_child=self._reset_in_child)
        self._thread = threading.Thread(
            target=self._watch, name="stop-requests", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if not self._keeps_deadline:
            self._deadline.clear()
        handlers = self._handlers.copy()
        self._handlers.clear()
        if handlers:
            signal.set_wakeup_fd(self._wakeup)
            for number, handler in handlers.items():
                signal.signal(number, handler)
        # It may wait for a key-value store that no longer answers.
        self._thread.join(2 * _TICK)
        if not self._thread.is_alive():
            os.close(self._read_end)
            os.close(self._write_end)

    def _reset_in_child(self) -> None:
        """In a forked child: its signals are its own."""
        if self._handlers:
            signal.set_wakeup_fd(-1)
            for number in self._handlers:
                signal.signal(number, signal.SIG_DFL)

    def _watch(self) -> None:
        while not self._closed.is_set():
            if select.select([self._read_end], [], [], _TICK)[0]:
                for number in os.read(self._read_end, 64):
                    if number in self._handlers:
                        self._receive(signal.Signals(number))
            if self._cause and self._requested is None:
                self._request(signal.SIGTERM)
                self._announce(signal.SIGTERM, self._cause)
            if self._last_step is None:
                self._agree()
            if time.monotonic() > self._end_by:
                self._exit(f"rank {self._rank} did not end in {self._grace:g} s")

    def _receive(self, number: signal.Signals) -> None:
        now = time.monotonic()
        has_limit = STOP_SIGNALS[number] == exit_codes.REQUEUE
        if self._requested_at:
            if has_limit and now - self._requested_at < _ECHO:
                return
            code = self.exit_code if self._is_saved else None
            exit_now(
                exit_codes.shell_exit_code(-number) if code is None else code,
                f"a second signal, {number.name}: rank {self._rank} ends at once\n",
            )
        self._requested_at = now
        self._request(number)
        self._announce(number, number.name)

    def _announce(self, number: signal.Signals, cause: str) -> None:
        has_limit = STOP_SIGNALS[number] == exit_codes.REQUEUE
        limit = f", in {self._grace:g} s" if has_limit else ""
        nth = "second one" if self._requested_at else "second signal"
        _log.warning(
            "%s: the run is to save and end%s; a %s ends it at once", cause, limit, nth
        )

    def _request(self, number: signal.Signals) -> None:
        code = STOP_SIGNALS[number]
        with self._changed:
            current = self._requested
            if current is None or STOP_SIGNALS[current] == exit_codes.INTERRUPTED:
                self._requested = number
        if code == exit_codes.REQUEUE and self._end_by == float("inf"):
            self._end_by = time.monotonic() + self._grace
            self._deadline.set(self._grace + _LAST_RESORT, code)

    def _agree(self) -> None:
        """Agree on the last step with the other ranks, after a request."""
        requests = self._read_requests()
        if self._requested is None and requests and self._rank == 0:
            first = min(requests)
            _log.warning("the run is to save and end: rank %s is asked to", first)
        for number, _ in requests.values():
            self._request(number)
        if self._requested is None:
            return
        if self._rank not in requests:
            # No step begins from here on until the last one is known.
            with self._changed:
                requests[self._rank] = self._requested, self._steps
            own = f"{self._requested.value} {requests[self._rank][1]}"
            self._put(_REQUESTS, own)
        if len(requests) < self._count:
            return
        last = max(steps for _, steps in requests.values())
        if not last:
            self._exit("nothing is to be saved before the first step")
        with self._changed:
            self._last_step = last
            self._changed.notify_all()

    def _read_requests(self) -> dict[int, tuple[signal.Signals, int]]:
        """The signal of each rank that has one, and how many steps it has begun.

        Anyone can connect and write to the store: what has another form does not count.
        """
        signals = {number.value: number for number in STOP_SIGNALS}
        requests: dict[int, tuple[signal.Signals, int]] = {}
        for rank, text in self._texts(_REQUESTS).items():
            match = _REQUEST.fullmatch(text)
            is_rank = rank.isdecimal() and len(rank) < 10 and int(rank) < self._count
            if is_rank and match and int(match[1]) in signals:
                requests[int(rank)] = signals[int(match[1])], int(match[2])
        return requests

    def _exit(self, reason: str) -> None:
        """End this process, outside of its main thread."""
        assert self._requested is not None
        self._put(_GONE, "gone")
        # The coordinator ends with rank 0, and JAX then aborts the ranks that are left.
        until = time.monotonic() + (0.0 if self._rank else _COORDINATOR_WAIT)
        while time.monotonic() < until and 0 < len(self._texts(_GONE)) < self._count:
            time.sleep(_TICK)
        text = f"{self._cause or self._requested.name}: {reason}\n"
        exit_now(STOP_SIGNALS[self._requested], text)

    def _texts(self, folder: str) -> dict[str, str]:
        if self._board is None:
            return {}
        now = time.monotonic()
        if self._requested is None and now - self._read_at < _READ_EVERY:
            return {}
        self._read_at = now
        try:
            return self._board.texts(folder)
        except Exception:  # the connection breaks at the end, or with another rank
            self._board = None
            return {}

    def _put(self, folder: str, text: str) -> None:
        if self._board is not None:
            with suppress(Exception):
                self._board.put(f"{folder}/{self._rank}", text)


def _ignore(number: int, frame: FrameType | None) -> None:
    """The handler in the main thread: the wakeup descriptor does the rest."""
