# SPDX-License-Identifier: Apache-2.0
"""Ends a rank that stays in one phase for too long, and says where every rank is.

A collective waits for ever for a rank that does not come, and JAX notices only that a
process is dead. So each rank says what it begins, and a thread of its own sees whether
that takes longer than it may. The launcher sees the same from outside, for a rank whose
interpreter does nothing any more.
"""

import faulthandler
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Final

from tessera.errors import StalledError
from tessera.runtime import exit_codes
from tessera.runtime.process_exit import leave
from tessera.runtime.status_page import Command, StatusPage

NO_LAUNCHER: Final = "the launcher is gone, and this rank ends with it\n"

_TICK: Final = 0.25
_PUBLISH_EVERY: Final = 2.0
# What the thread may sleep beyond a tick before the process counts as stopped, by
# Ctrl-Z or a suspended machine; that time is no phase's.
_LONGEST_TICK: Final = 2.0
_ASK_FOR: Final = 3.0
_OTHERS_SHOW: Final = 1.0


@dataclass(frozen=True)
class Phase:
    """What a rank does.

    Attributes:
      kind: What deadlines are given for: ``"step"``.
      name: With its number: ``"step 12"``.
      since: When it began, by ``time.monotonic``.
    """

    kind: str
    name: str
    since: float


class Watchdog:
    """Watches this process from ``start`` to ``stop``.

    Args:
      deadlines: Seconds for each kind of phase; None for no limit, as for a kind that
        is not here.
      rank: This process's rank.
      page: Where the launcher reads; None without one.
      local_rank: This process's place on the page.
      has_launcher: Whether the launcher lives; when it is gone, so is this process.
    """

    def __init__(
        self,
        deadlines: Mapping[str, float | None],
        *,
        rank: int = 0,
        page: StatusPage | None = None,
        local_rank: int = 0,
        has_launcher: Callable[[], bool] | None = None,
    ) -> None:
        self._deadlines, self._rank = deadlines, rank
        self._page, self._local_rank = page, local_rank
        self._has_launcher = has_launcher
        self._stopped = threading.Event()
        self._is_ending = False
        self._phase = Phase("start", "start", time.monotonic())
        self._publish: Callable[[str], None] | None = None
        self._read: Callable[[], Mapping[str, str]] | None = None

    def enter(self, kind: str, number: int | None = None) -> None:
        """Say that a phase begins.

        Args:
          kind: ``"startup"``, ``"compile"``, ``"step"``, ``"evaluation"``, or any
            other, which has no deadline.
          number: Counts phases of one kind.
        """
        name = kind if number is None else f"{kind} {number}"
        self._phase = phase = Phase(kind, name, time.monotonic())
        if self._page is not None:
            limit = self._limit(kind)
            self._page.enter(self._local_rank, name, phase.since, limit)

    def start(self) -> None:
        """Begin to watch."""
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def stop(self) -> None:
        """Watch no more."""
        self._stopped.set()
        self.enter("end")

    def fail(self) -> None:
        """Tell the launcher that this rank failed, and when.

        Where the watchdog is ending the process, what fails meanwhile waits for it.
        """
        if self._is_ending and threading.current_thread() is threading.main_thread():
            time.sleep(_ASK_FOR + 2 * _OTHERS_SHOW)
        if self._page is not None:
            self._page.fail(self._local_rank, time.monotonic())

    def connect(
        self, publish: Callable[[str], None], read: Callable[[], Mapping[str, str]]
    ) -> None:
        """Tell the other ranks this one's phase every two seconds, and read theirs.

        Args:
          publish: Writes the phase where the others read it. It may wait.
          read: The phases of all ranks, by rank. It may wait.
        """
        self._publish, self._read = publish, read
        threading.Thread(target=self._publish_all, name="phases", daemon=True).start()

    def _limit(self, kind: str) -> float:
        limit = self._deadlines.get(kind)
        return inf if limit is None else limit

    def _watch(self) -> None:
        phase, awake, before = self._phase, 0.0, time.monotonic()
        while not self._stopped.wait(_TICK):
            now = time.monotonic()
            gap, before = now - before, now
            counted = gap if gap < _LONGEST_TICK else _TICK
            self._obey()
            if self._phase is not phase:
                phase, awake = self._phase, 0.0
                counted = min(counted, now - phase.since)
            awake += counted
            if awake > self._limit(phase.kind):
                self._end(phase, awake)

    def _obey(self) -> None:
        if self._has_launcher is not None and not self._has_launcher():
            leave(exit_codes.ENDED, NO_LAUNCHER)
        command = Command.CONTINUE if self._page is None else self._page.command
        if command == Command.SHOW_STACKS_AND_END:
            _write(f"stacks of rank {self._rank}, in phase {self._phase.name!r}:\n")
            _show_stacks()
            # The rank that asked for it goes first: its end is no consequence.
            time.sleep(2 * _OTHERS_SHOW)
        if command != Command.CONTINUE:
            leave(exit_codes.ENDED)

    def _end(self, phase: Phase, seconds: float) -> None:
        self._is_ending = True
        self.fail()
        _write(f"stacks of rank {self._rank}, in phase {phase.name!r}:\n")
        _show_stacks()
        limit = f"runtime.{phase.kind}_deadline"
        error = StalledError(
            f"rank {self._rank} does not get on: phase {phase.name!r} takes longer "
            f"than {limit}",
            got=f"{seconds:.1f} s, of {self._limit(phase.kind):g} s\n{self._others()}",
            fix="the stacks show what each rank waits for; the one that is not in a "
            f"collective holds up the others\nif nothing is wrong, raise {limit}",
        )
        if self._page is not None:
            # With the end of this rank JAX may abort the others, which show theirs now.
            self._page.command = Command.SHOW_STACKS_AND_END
            time.sleep(_OTHERS_SHOW)
        leave(StalledError.exit_code, f"{error}\n")

    def _others(self) -> str:
        """Where every rank is, one line each; what can be learnt of it in time."""
        found: dict[str, str] = {}

        def ask() -> None:
            if self._read is not None:
                found.update(self._read())

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(_ASK_FOR)
        found[str(self._rank)] = self._said()
        ranks = sorted(found, key=lambda rank: (not rank.isdecimal(), rank.zfill(9)))
        return "\n".join(f"rank {rank}: {found[rank]}" for rank in ranks)

    def _said(self) -> str:
        return f"{self._phase.name}, for {time.monotonic() - self._phase.since:.1f} s"

    def _publish_all(self) -> None:
        while self._publish is not None and not self._stopped.is_set():
            try:
                self._publish(self._said())
            except Exception:  # of the connection, at the end of the run or of others
                return
            self._stopped.wait(_PUBLISH_EVERY)


def _write(text: str) -> None:
    stream = sys.__stderr__
    if stream is not None:
        # Nobody may read it any more: that must not keep the process from its end.
        with suppress(OSError):
            stream.write(text)
            stream.flush()


def _show_stacks() -> None:
    with suppress(OSError, ValueError):
        faulthandler.dump_traceback(sys.__stderr__ or 2)
