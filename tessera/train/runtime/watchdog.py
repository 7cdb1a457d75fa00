# SPDX-License-Identifier: Apache-2.0
"""The watchdog: ends a rank whose phase exceeds its deadline, and shows all stacks.

A collective waits forever for a rank that never arrives, and JAX only notices processes
that are dead. So each rank reports the phase it begins, and a thread checks its
duration. The launcher does the same from outside for a rank whose interpreter is stuck.

``faulthandler`` writes the stacks. Its ``dump_traceback_later`` is not the timer,
because it knows neither phases nor the other ranks, counts time in which the process
was stopped, and can only exit with code 1.
"""

import faulthandler
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import Final, TypeAlias

from tessera.errors import StalledError
from tessera.train.runtime import exit_codes
from tessera.train.runtime.launcher_protocol import ParentLauncher, Status
from tessera.train.runtime.process_exit import exit_now

OnPhase: TypeAlias = Callable[[str, int | None, float], None]

_TICK: Final = 0.25
_PUBLISH_EVERY: Final = 2.0
# A longer tick means that the process was stopped, by Ctrl-Z or a suspended machine;
# that time does not count.
_LONGEST_TICK: Final = 2.0
_QUERY_TIMEOUT: Final = 3.0
# How long a failure in the main thread waits while the watchdog ends the process.
_ENDING: Final = 5.0


class Watchdog:
    """Watches this process from ``start`` to ``stop``.

    Args:
      deadlines: Seconds for each kind of phase; None, or no entry, is no limit.
      rank: This process's rank.
      launcher: Learns the phases, and may end the process; None without a launcher.
    """

    def __init__(
        self,
        deadlines: Mapping[str, float | None],
        *,
        rank: int = 0,
        launcher: ParentLauncher | None = None,
    ) -> None:
        self._deadlines, self._rank, self._launcher = deadlines, rank, launcher
        self._stopped = threading.Event()
        self._is_ending, self._status = False, Status("start", time.monotonic())
        self._read: Callable[[], Mapping[str, str]] = dict
        self._on_phase: OnPhase | None = None
        # What a subscriber has missed; without one, only the last.
        self._begun: deque[tuple[str, int | None, float]] = deque(maxlen=32)

    def enter(self, kind: str, number: int | None = None) -> None:
        """Report that a phase begins.

        Args:
          kind: ``"startup"``, ``"compile"``, ``"step"``, ``"evaluation"``, or any
            other, which has no deadline.
          number: Counts phases of one kind.
        """
        phase = kind if number is None else f"{kind} {number}"
        limit, now = self._deadlines.get(kind), time.monotonic()
        deadline = inf if limit is None else limit
        self._report(Status(phase, now, deadline, self._status.failed_at))
        if self._on_phase is None:
            self._begun.append((kind, number, now))
        else:
            self._on_phase(kind, number, now)

    def subscribe(self, on_phase: OnPhase) -> None:
        """Call back with each phase that begins, at first with those that have begun.

        Args:
          on_phase: Takes the kind, the number, and ``time.monotonic()`` then.
        """
        for begun in self._begun:
            on_phase(*begun)
        self._begun.clear()
        self._on_phase = on_phase

    def start(self) -> None:
        """Begin to watch, if the launcher has not ended this process's attempt."""
        self._obey_launcher()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def stop(self) -> None:
        """Stop watching."""
        self._stopped.set()
        self.enter("end")

    def fail(self) -> None:
        """Tell the launcher that this rank failed, and when.

        While the watchdog ends the process, a failure in the main thread waits for it.
        """
        if self._is_ending and threading.current_thread() is threading.main_thread():
            time.sleep(_ENDING)
        failed_at = self._status.failed_at or time.monotonic()
        self._report(replace(self._status, failed_at=failed_at))

    def connect(
        self, publish: Callable[[str], None], read: Callable[[], Mapping[str, str]]
    ) -> None:
        """Publish this rank's phase every two seconds, and read those of the others.

        Args:
          publish: Writes the phase where the others read it. It may block.
          read: The phases of all ranks, by rank. It may block.
        """
        self._read = read

        def publish_phases() -> None:
            # The connection breaks at the end of the run, or with another rank.
            with suppress(Exception):
                while not self._stopped.is_set():
                    publish(str(self._status))
                    self._stopped.wait(_PUBLISH_EVERY)

        threading.Thread(target=publish_phases, name="phases", daemon=True).start()

    def _report(self, status: Status) -> None:
        self._status = status
        if self._launcher is not None:
            self._launcher.report(status)

    def _watch(self) -> None:
        status, awake, before = self._status, 0.0, time.monotonic()
        while not self._stopped.wait(_TICK):
            now = time.monotonic()
            gap, before = now - before, now
            counted = gap if gap < _LONGEST_TICK else _TICK
            self._obey_launcher()
            if self._status is not status:
                status, awake = self._status, 0.0
                counted = min(counted, now - status.since)
            awake += counted
            if awake > status.deadline:
                self._end(status, awake)

    def _obey_launcher(self) -> None:
        reason = self._launcher.reason_to_end() if self._launcher else None
        if reason is not None:
            exit_now(exit_codes.TERMINATED, f"{reason}\n")

    def _end(self, status: Status, seconds: float) -> None:
        self._is_ending = True
        self.fail()
        self._show_stacks(status.phase)
        limit = f"runtime.{status.phase.split()[0]}_deadline"
        error = StalledError(
            f"rank {self._rank} does not get on: phase {status.phase!r} takes longer "
            f"than {limit}",
            got=f"{seconds:.1f} s, of {status.deadline:g} s\n"
            + self._phases_of_all_ranks(),
            fix="the stacks show what each rank waits for; the one that is not in a "
            f"collective holds up the others\nif nothing is wrong, raise {limit}",
        )
        exit_now(StalledError.exit_code, f"{error}\n")

    def _phases_of_all_ranks(self) -> str:
        """One line for each rank whose phase can be read in time."""
        phases: dict[str, str] = {}
        query = threading.Thread(
            target=lambda: phases.update(self._read()), daemon=True
        )
        query.start()
        query.join(_QUERY_TIMEOUT)
        phases[str(self._rank)] = str(self._status)
        ranks = sorted(phases, key=lambda rank: (not rank.isdecimal(), rank.zfill(9)))
        return "\n".join(f"rank {rank}: {phases[rank]}" for rank in ranks)

    def _show_stacks(self, phase: str) -> None:
        stream = sys.__stderr__
        # A pipe without a reader must not keep the process from ending.
        with suppress(OSError):
            if stream is not None:
                stream.write(f"stacks of rank {self._rank}, in phase {phase!r}:\n")
                stream.flush()
        with suppress(OSError, ValueError):
            faulthandler.dump_traceback(stream or 2)
