# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of one machine, watches them, and ends all when one of them fails.

The launcher knows nothing of what its ranks compute: it reads their output, their exit
codes and the page on which each says its phase. So it ends a rank that can no longer
end itself, and says which failed first.
"""

import os
import queue
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from types import FrameType
from typing import Final

from tessera.file_locks import lock
from tessera.runtime import exit_codes
from tessera.runtime.cluster import LOOPBACK
from tessera.runtime.exit_codes import ASKS
from tessera.runtime.failures import Failure, first_of, how_it_ended, what_to_read
from tessera.runtime.launcher_messages import ALIVE, STATUS
from tessera.runtime.rank_process import Ended, Rank
from tessera.runtime.status_page import Command, StatusPage

FORWARDED: Final = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
    *(signal.SIGUSR1, signal.SIGUSR2),
)
# Exit codes after which the same command would end alike.
_FINAL: Final = (exit_codes.MISTAKE,)

_TICK: Final = 0.1
# How long after the first failure another may be seen that was earlier.
_SETTLE: Final = 0.5
# How long a rank's own watchdog may be late, and the stacks of the others take.
_LATE: Final = 5.0
_STACKS: Final = 3.0
_BEFORE_ABORT: Final = 2.0


@dataclass(frozen=True)
class Plan:
    """What to start on this machine.

    Attributes:
      command: The program of every rank.
      num_local: Ranks on this machine.
      first_rank: The number of the first of them in the run.
      world_size: Ranks of the run, on all machines.
      coordinator: Where rank 0 listens, host and port; None takes a free port of this
        machine, anew in each attempt.
      max_restarts: How often to start all ranks again after one failed.
      grace: Seconds from asking a rank to end to killing it.
    """

    command: tuple[str, ...]
    num_local: int
    first_rank: int
    world_size: int
    coordinator: tuple[str, int] | None
    max_restarts: int = 0
    grace: float = 30.0


class Launcher:
    """Runs a plan: ``Launcher(plan).run()`` gives the exit code.

    Args:
      plan: What to start.
      environ: The environment variables that the ranks inherit.
    """

    def __init__(self, plan: Plan, environ: Mapping[str, str]) -> None:
        self._plan, self._environ = plan, environ
        self._output = threading.Lock()
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()

    def run(self) -> int:
        """Start the ranks, again after a failure where the plan says so.

        Returns:
          0, or the exit code of the rank that failed first: 128 and the signal's number
          for one that was killed.
        """
        plan = self._plan
        with (
            tempfile.TemporaryDirectory(prefix="tessera-") as folder,
            (Path(folder) / ALIVE).open("wb") as alive,
            self._signals_kept(),
        ):
            lock(alive.fileno())
            for attempt in range(plan.max_restarts + 1):
                group = self._start(attempt, Path(folder))
                failure = group.watch(self._signals)
                if failure is None:
                    return exit_codes.SUCCESS
                code = exit_codes.exit_code_of(failure.returncode)
                if failure.is_as_asked:
                    self._say(f"all ranks ended as asked: exit code {code}")
                    return code
                last = attempt == plan.max_restarts or code in _FINAL
                self._report(group, failure)
                if last or group.asked_by is not None:
                    return code
                self._say(f"restart {attempt + 1} of {plan.max_restarts}")
        raise AssertionError("the last attempt returns")

    def _start(self, attempt: int, folder: Path) -> "Group":
        plan = self._plan
        page = StatusPage.create(folder / STATUS, plan.num_local)
        host, port = plan.coordinator or (LOOPBACK, free_port())
        ranks = range(plan.first_rank, plan.first_rank + plan.num_local)
        of = f" of {plan.world_size}" if plan.num_local < plan.world_size else ""
        self._say(
            f"starting {_listed('rank', ranks)}{of}, rank 0 at {host}:{port}"
            + f", attempt {attempt + 1}" * bool(attempt)
        )
        group = Group(page, plan.grace, self._say)
        for local_rank, rank in enumerate(ranks):
            environment = {
                **self._environ,
                **variables(plan, local_rank, (host, port)),
                "TESSERA_ATTEMPT": str(attempt),
                "TESSERA_STATUS": str(page.path),
                "TESSERA_LAUNCHER": str(os.getpid()),
            }
            started = Rank(
                plan.command, environment, rank, local_rank, self._show, group.tell
            )
            group.ranks.append(started)
        return group

    def _report(self, group: "Group", failure: Failure) -> None:
        """Say what happened; what a person has to read comes last."""
        first = group.ranks[failure.rank - self._plan.first_rank]
        others = [
            f"rank {rank.rank}: {how_it_ended(rank.returncode)}"
            for rank in group.ranks
            if rank is not first
        ]
        seconds = failure.ended_at - first.started_at
        if others:
            self._say("the others, in consequence: " + "; ".join(others))
        self._say(f"failed first, {seconds:.1f} s after its start: {failure}")
        prefix = f"[rank {failure.rank}] "
        for line in what_to_read(first.last_lines(2)):
            self._show(2, f"{prefix}{line}\n".encode(errors="backslashreplace"))

    @contextmanager
    def _signals_kept(self) -> Iterator[None]:
        """Put signals into a queue, those that are not ignored."""

        def keep(number: int, frame: FrameType | None) -> None:
            del frame
            self._signals.put(number)

        before = {number: signal.getsignal(number) for number in FORWARDED}
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, keep)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _show(self, stream: int, line: bytes) -> None:
        target = (sys.stdout if stream == 1 else sys.stderr).buffer
        with self._output:
            target.write(line)
            target.flush()

    def _say(self, text: str) -> None:
        self._show(2, f"[launch] {text}\n".encode(errors="backslashreplace"))


@dataclass
class Group:
    """The ranks of one attempt, from their start to the end of the last.

    Attributes:
      page: Where they say their phase.
      grace: Seconds from asking a rank to end to killing it.
      say: Shows a line of the launcher's.
      ranks: The processes.
      asked_by: The signal by which a person or a scheduler asked the launcher to end.
    """

    page: StatusPage
    grace: float
    say: Callable[[str], None]
    ranks: list[Rank] = field(default_factory=list)
    asked_by: int | None = None
    _events: queue.SimpleQueue[Ended] = field(default_factory=queue.SimpleQueue)
    _end_by: float | None = None
    _late: dict[int, str] = field(default_factory=dict)

    def tell(self, ended: Ended) -> None:
        """Take the news of a rank's end, from any thread."""
        self._events.put(ended)

    def watch(self, signals: "queue.SimpleQueue[int]") -> Failure | None:
        """Wait for all ranks; the first failure, or None where there was none."""
        failures: list[Failure] = []
        try:
            while not self._all_done and (
                self._are_killed or all(one.is_as_asked for one in failures)
            ):
                if failures and self._end_by is None:
                    # The others know of it, and may have to write what they save.
                    self._end_by = time.monotonic() + self.grace
                self._forward(signals)
                failures += self._gathered(_TICK)
                self._end_the_late()
            if self._are_killed:
                # Where others had saved and ended, the run goes on from that.
                failures = [one for one in failures if one.is_as_asked] or failures
            if failures and not (first := first_of(failures)).is_as_asked:
                self.say(str(first))
                failures += self._end_all(first, signals)
        finally:
            for rank in self._running:
                rank.kill()
        return first_of(failures) if failures else None

    @property
    def _running(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.ended is None]

    @property
    def _are_killed(self) -> bool:
        """Whether ranks did not end in time, and were killed for it."""
        return self._end_by == inf

    @property
    def _all_done(self) -> bool:
        return all(rank.is_finished for rank in self.ranks)

    def _news(self, seconds: float) -> Iterator[Ended]:
        """Ends within a time: waits for the first, and takes those that are there."""
        try:
            yield self._events.get(timeout=seconds)
            while True:
                yield self._events.get_nowait()
        except queue.Empty:
            return

    def _finished(self, ended: Ended) -> Failure | None:
        rank = self.ranks[ended.local_rank]
        rank.finish()
        status = self.page.status(ended.local_rank)
        code = rank.returncode
        if code == 0:
            return None
        if self.asked_by is not None and code == -self.asked_by:
            # It had no handler yet, or has none: it ended as asked all the same.
            code = ASKS.get(signal.Signals(self.asked_by), code)
        phase = self._late.get(ended.local_rank, status.phase)
        return Failure(rank.rank, code, ended.at, status.failed_at, phase)

    def _forward(self, signals: "queue.SimpleQueue[int]") -> None:
        """Pass signals on; after one that ends, kill what has not ended in time."""
        while not signals.empty():
            number = signals.get()
            name = signal.Signals(number).name
            if number == signal.SIGUSR1:
                self.say(f"{name} to all ranks")
            elif self.asked_by is None:
                self.asked_by = number
                self._end_by = time.monotonic() + self.grace
                self.say(f"{name} to all ranks, which have {self.grace:g} s to end")
            else:
                self.say(f"a second {name}: killing all ranks")
                self._end_by = 0.0
            for rank in self._running:
                rank.send(number)
        if self._end_by is not None and time.monotonic() > self._end_by:
            if self._end_by:
                self.say(f"not ended {self.grace:g} s after they were asked: SIGKILL")
            for rank in self._running:
                rank.kill()
            self._end_by = inf

    def _end_the_late(self) -> None:
        """End ranks whose own watchdog should have ended them, and could not.

        SIGABRT first, whose handler shows the stacks without the interpreter's help.
        """
        now = time.monotonic()
        for rank in self._running:
            status = self.page.status(rank.local_rank)
            late = now - status.since - status.deadline
            if late < _LATE:
                continue
            if rank.local_rank not in self._late:
                self._late[rank.local_rank] = status.phase
                self.say(
                    f"rank {rank.rank} has been in phase {status.phase!r} for "
                    f"{now - status.since:.1f} s, of {status.deadline:g} s, and its "
                    "watchdog does not act: SIGABRT"
                )
                rank.send(signal.SIGABRT)
            elif late > _LATE + _BEFORE_ABORT:
                rank.kill()

    def _end_all(
        self, failure: Failure, signals: "queue.SimpleQueue[int]"
    ) -> list[Failure]:
        """End the ranks that still run; those that had failed by themselves before."""
        failures = self._gathered(_SETTLE)
        asked = self.page.command == Command.SHOW_STACKS_AND_END
        if asked or failure.rank - self.ranks[0].rank in self._late:
            self._show_phases()
            self.page.command = Command.SHOW_STACKS_AND_END
            later = self._gathered(_STACKS)
            for rank in self._running:
                rank.send(signal.SIGABRT)  # shows them without the interpreter's help
            self._gathered(_BEFORE_ABORT)
            # Of those that end now, only one that said so earlier may be the first.
            failures += [one for one in later if one.failed_at]
        self.page.command = Command.END
        for rank in self._running:
            rank.send(signal.SIGTERM)
        until = time.monotonic() + self.grace
        while self._running and time.monotonic() < until and signals.empty():
            self._gathered(_TICK)
        for rank in self._running:
            self.say(f"rank {rank.rank} does not end: SIGKILL")
            rank.kill()
        while not self._all_done:
            self._gathered(_TICK)
        return failures

    def _gathered(self, seconds: float) -> list[Failure]:
        """Failures within a time, or until no rank runs."""
        until, found = time.monotonic() + seconds, list[Failure]()
        while not self._all_done:
            left = until - time.monotonic()
            if left <= 0:
                break
            found += [f for ended in self._news(left) if (f := self._finished(ended))]
        return found

    def _show_phases(self) -> None:
        now = time.monotonic()
        for rank in self.ranks:
            status = self.page.status(rank.local_rank)
            if status.phase:
                state = f"{status.phase}, for {now - status.since:.1f} s"
                self.say(f"rank {rank.rank} was in: {state}")


def variables(
    plan: Plan, local_rank: int, coordinator: tuple[str, int]
) -> dict[str, str]:
    """The environment variables that tell a rank where it is in the run.

    Those of torchrun are set as well, so that a program that reads them sees its own
    rank, where the launcher may have been told the first rank of the machine in them.
    """
    rank, (host, port) = plan.first_rank + local_rank, coordinator
    place = {
        "RANK": rank,
        "WORLD_SIZE": plan.world_size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": plan.num_local,
    }
    return {
        **{name: str(value) for name, value in place.items()},
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TESSERA_RANK": str(rank),
        "TESSERA_WORLD_SIZE": str(plan.world_size),
        "TESSERA_LOCAL_RANK": str(local_rank),
        "TESSERA_LOCAL_SIZE": str(plan.num_local),
        "TESSERA_COORDINATOR": f"{host}:{port}",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }


def free_port() -> int:
    """A port of the loopback interface that is free, and the next one is too."""
    while True:
        with socket.create_server((LOOPBACK, 0)) as first:
            port: int = first.getsockname()[1]
            try:
                socket.create_server((LOOPBACK, port + 1)).close()
            except (OSError, OverflowError):
                continue
            return port


def _listed(what: str, numbers: Iterable[int]) -> str:
    found = list(numbers)
    if len(found) == 1:
        return f"{what} {found[0]}"
    return f"{what}s {found[0]} to {found[-1]}"
