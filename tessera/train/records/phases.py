# SPDX-License-Identifier: Apache-2.0
"""Records how long each phase of an attempt took.

The watchdog's phases begin before a run has its folder: they are kept until there is a
file to record them in. Steps in a row are one phase, which is recorded in parts, so
that a kill loses seconds of it and not hours.
"""

import os
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from tessera.train.records.goodput import STEP_PARTS
from tessera.train.runtime.process_age import process_age

# A part of a phase of steps takes a hundredth of the attempt, within these seconds.
_SHORTEST_PART: Final = 1.0
_LONGEST_PART: Final = 10.0


class PhaseClock:
    """Turns the phases that a process enters into records of their lengths.

    Durations are those of the monotonic clock: setting the clock of the machine
    changes the time at which a phase began, and not its length.
    """

    def __init__(self) -> None:
        age = process_age(os.getpid())
        self.process_start = time.time() - age
        """When this process began, in seconds since 1970."""
        self._first = self._since = time.monotonic() - age
        self._phase, self._steps, self._data = "start", (0, 0), 0.0
        self._lock = threading.Lock()
        self._waiting: list[dict[str, Any]] = []
        self._record: Callable[..., object] = self._keep

    def enter(
        self, phase: str, number: int | None = None, at: float | None = None
    ) -> None:
        """Record the phase that ends; from any thread.

        Args:
          phase: The one that begins: ``"step"``, ``"compile"``, …
          number: The step's.
          at: When, by ``time.monotonic()``; None is now.
        """
        with self._lock:
            now, step = time.monotonic() if at is None else at, number or 0
            first, last = self._steps
            follows = phase == self._phase == "step" and step == last + 1
            part = min(max((now - self._first) / 100, _SHORTEST_PART), _LONGEST_PART)
            if follows and now - self._since < part:
                self._steps = first, step
                return
            self._end(now)
            self._phase, self._steps = phase, (step, step)

    def add_data_wait(self, seconds: float) -> None:
        """Count time of the current phase in which it waited for a batch."""
        self._data += seconds

    def attach(self, record: Callable[..., object]) -> None:
        """Record phases from now on, and those that have ended before.

        Args:
          record: Takes ``"phase"`` and its fields, as ``EventLog.write`` does.
        """
        with self._lock:
            self._record = record
            for fields in self._waiting:
                record("phase", **fields)
            self._waiting.clear()

    def finish(self) -> None:
        """Record the phase that is going on, and none after it."""
        self.enter("end")
        self._record = self._keep

    def _keep(self, event: str, **fields: Any) -> None:
        self._waiting.append(fields)

    def _end(self, now: float) -> None:
        """Record the current phase; the next one begins now."""
        seconds, self._since = now - self._since, now
        fields: dict[str, Any] = {"phase": self._phase, "seconds": round(seconds, 6)}
        if self._phase in STEP_PARTS:
            first, last = self._steps
            fields |= {"first_step": first, "last_step": last}
        if self._phase == "step":
            data, self._data = min(self._data, seconds), 0.0
            fields |= {"data_seconds": round(data, 6)}
        begin = time.time() - (time.monotonic() - now) - seconds
        self._record("phase", at=round(begin, 6), **fields)
