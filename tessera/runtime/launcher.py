# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of one machine, watches them, and ends all when one of them fails.

The launcher does not know what its ranks compute: it reads their output, their exit
codes and the status page on which each reports its phase. So it can end a rank that can
no longer end itself, and tell which rank failed first.
"""

import os
import queue
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from types import FrameType
from typing import Final

from tessera.file_locks import lock
from tessera.runtime import exit_codes
from tessera.runtime.cluster import LOOPBACK
from tessera.runtime.exit_codes import STOP_SIGNALS
from tessera.runtime.launcher_protocol import (
    LOCK_FILE,
    STATUS_FILE,
    Command,
    StatusPage,
)
from tessera.runtime.rank_failures import (
    Failure,
    describe_exit,
    first_failure,
    relevant_lines,
)
from tessera.runtime.rank_process import RankProcess

FORWARDED: Final = (*STOP_SIGNALS, signal.SIGHUP, signal.SIGUSR1)
# Exit codes after which the same command would fail in the same way.
_FINAL: Final = (exit_codes.USER_ERROR,)

_TICK: Final = 0.1
# How long after the first failure one may be seen that happened before it.
_SETTLE: Final = 0.5
# How late a rank's own watchdog may be, and how long the stacks of the others take.
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
      coordinator: Host and port of rank 0; None takes a free port of this machine, a
        new one in each attempt.
      max_restarts: How often to start all ranks again after a failure.
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
    """Runs a plan: ``Launcher(plan, os.environ).run()`` returns the exit code.

    Args:
      plan: What to start.
      environ: The environment variables that the ranks inherit.
    """

    def __init__(self, plan: Plan, environ: Mapping[str, str]) -> None:
        self._plan, self._environ = plan, environ
        self._output = threading.Lock()
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()

    def run(self) -> int:
        """Start the ranks, and again after a failure if the plan allows it.

        Returns:
          0, or the exit code of the rank that failed first: 128 and the signal's number
          for one that was killed.
        """
        plan = self._plan
        with (
            tempfile.TemporaryDirectory(prefix="tessera-") as folder,
            (Path(folder) / LOCK_FILE).open("wb") as lock_file,
            self._queued_signals(),
        ):
            lock(lock_file.fileno())
            for attempt in range(plan.max_restarts + 1):
                group = self._start(attempt, Path(folder))
                failure = group.watch(self._signals)
                if failure is None:
                    return exit_codes.SUCCESS
                code = exit_codes.shell_exit_code(failure.returncode)
                if failure.is_requested_stop:
                    self._log(f"all ranks ended as asked: exit code {code}")
                    return code
                is_last = attempt == plan.max_restarts or code in _FINAL
                self._report(group, failure)
                if is_last or group.stop_signal is not None:
                    return code
                self._log(f"restart {attempt + 1} of {plan.max_restarts}")
        raise AssertionError("the last attempt returns")

    def _start(self, attempt: int, folder: Path) -> "Group":
        plan = self._plan
        page = StatusPage.create(folder / STATUS_FILE, plan.num_local)
        host, port = plan.coordinator or (LOOPBACK, free_port())
        ranks = range(plan.first_rank, plan.first_rank + plan.num_local)
        names = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to "
        names += f"{ranks[-1]}" * (len(ranks) > 1)
        of = f" of {plan.world_size}" if plan.num_local < plan.world_size else ""
        self._log(
            f"starting {names}{of}, rank 0 at {host}:{port}"
            + f", attempt {attempt + 1}" * bool(attempt)
        )
        group = Group(page, plan.grace, self._log)
        for local_rank, rank in enumerate(ranks):
            environment = {
                **self._environ,
                **variables(plan, local_rank, (host, port)),
                "TESSERA_ATTEMPT": str(attempt),
                "TESSERA_STATUS": str(page.path),
                "TESSERA_LAUNCHER": str(os.getpid()),
            }
            process = RankProcess(
                *(plan.command, environment, rank, local_rank),
                *(self._show, group.exits.put),
            )
            group.ranks.append(process)
        return group

    def _report(self, group: "Group", failure: Failure) -> None:
        """Log the failure; what a person has to read comes last."""
        first = group.ranks[failure.rank - self._plan.first_rank]
        others = [
            f"rank {rank.rank}: {describe_exit(rank.returncode)}"
            for rank in group.ranks
            if rank is not first
        ]
        seconds = failure.ended_at - first.started_at
        if others:
            self._log("the others, in consequence: " + "; ".join(others))
        self._log(f"failed first, {seconds:.1f} s after its start: {failure}")
        prefix = f"[rank {failure.rank}] "
        for line in relevant_lines(first.last_lines(2)):
            self._show(2, f"{prefix}{line}\n".encode(errors="backslashreplace"))

    @contextmanager
    def _queued_signals(self) -> Iterator[None]:
        """Queue the signals that are not ignored."""

        def put(number: int, frame: FrameType | None) -> None:
            del frame
            self._signals.put(number)

        before = {number: signal.getsignal(number) for number in FORWARDED}
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, put)
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

    def _log(self, text: str) -> None:
        self._show(2, f"[launch] {text}\n".encode(errors="backslashreplace"))


@dataclass
class Group:
    """The ranks of one attempt, from their start to the exit of the last.

    Attributes:
      page: Where they report their phase.
      grace: Seconds from asking a rank to end to killing it.
      log: Shows a line of the launcher's.
      ranks: The processes.
      exits: Local ranks whose process has ended, in that order, from any thread.
      stop_signal: The signal by which the launcher was asked to end.
    """

    page: StatusPage
    grace: float
    log: Callable[[str], None]
    ranks: list[RankProcess] = field(default_factory=list)
    exits: queue.SimpleQueue[int] = field(default_factory=queue.SimpleQueue)
    stop_signal: int | None = None
    _end_by: float | None = None
    _late: dict[int, str] = field(default_factory=dict)

    def watch(self, signals: "queue.SimpleQueue[int]") -> Failure | None:
        """Wait for all ranks; the first failure, or None."""
        failures: list[Failure] = []
        try:
            while not self._all_finished and (
                self._are_killed or all(one.is_requested_stop for one in failures)
            ):
                if failures and self._end_by is None:
                    # The others were asked to stop too, and may have to save first.
                    self._end_by = time.monotonic() + self.grace
                self._forward(signals)
                failures += self._collect(_TICK)
                self._end_late_ranks()
            if self._are_killed:
                # If the others had saved and ended, the run resumes from there.
                failures = [f for f in failures if f.is_requested_stop] or failures
            if failures and not (first := first_failure(failures)).is_requested_stop:
                self.log(str(first))
                failures += self._end_all(first, signals)
        finally:
            for rank in self._running:
                rank.kill()
        return first_failure(failures) if failures else None

    @property
    def _running(self) -> list[RankProcess]:
        return [rank for rank in self.ranks if rank.ended_at is None]

    @property
    def _are_killed(self) -> bool:
        """Whether ranks did not end in time, and were killed for it."""
        return self._end_by == inf

    @property
    def _all_finished(self) -> bool:
        return all(rank.is_finished for rank in self.ranks)

    def _collect(self, seconds: float) -> list[Failure]:
        """The failures seen within a time, or until no rank runs."""
        until, failures = time.monotonic() + seconds, list[Failure]()
        while not self._all_finished and (left := until - time.monotonic()) > 0:
            try:
                local_rank = self.exits.get(timeout=left)
            except queue.Empty:
                break
            if failure := self._finish(local_rank):
                failures.append(failure)
        return failures

    def _finish(self, local_rank: int) -> Failure | None:
        rank = self.ranks[local_rank]
        rank.finish()
        status = self.page.status(local_rank)
        code = rank.returncode
        if code == 0:
            return None
        if self.stop_signal is not None and code == -self.stop_signal:
            # It has no handler, or none yet: it stopped as requested all the same.
            code = STOP_SIGNALS.get(signal.Signals(self.stop_signal), code)
        phase = self._late.get(local_rank, status.phase)
        ended_at = rank.ended_at or time.monotonic()
        return Failure(rank.rank, code, ended_at, status.failed_at, phase)

    def _forward(self, signals: "queue.SimpleQueue[int]") -> None:
        """Forward signals; kill the ranks that do not end in time after one."""
        while not signals.empty():
            number = signals.get()
            name = signal.Signals(number).name
            if number == signal.SIGUSR1:
                self.log(f"{name} to all ranks")
            elif self.stop_signal is None:
                self.stop_signal = number
                self._end_by = time.monotonic() + self.grace
                self.log(f"{name} to all ranks, which have {self.grace:g} s to end")
            else:
                self.log(f"a second {name}: killing all ranks")
                self._end_by = 0.0
            for rank in self._running:
                rank.send(number)
        if self._end_by is not None and time.monotonic() > self._end_by:
            if self._end_by:
                self.log(f"not ended {self.grace:g} s after they were asked: SIGKILL")
            for rank in self._running:
                rank.kill()
            self._end_by = inf

    def _end_late_ranks(self) -> None:
        """End ranks whose own watchdog should have ended them, and could not.

        SIGABRT first: its handler shows the stacks without the interpreter's help.
        """
        now = time.monotonic()
        for rank in self._running:
            status = self.page.status(rank.local_rank)
            late = now - status.since - status.deadline
            if late < _LATE:
                continue
            if rank.local_rank not in self._late:
                self._late[rank.local_rank] = status.phase
                self.log(
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
        """End the ranks that still run; returns the failures that preceded this."""
        failures = self._collect(_SETTLE)
        is_stalled = self.page.command == Command.SHOW_STACKS_AND_END
        if is_stalled or failure.rank - self.ranks[0].rank in self._late:
            failures += self._show_stacks()
        self.page.command = Command.END
        for rank in self._running:
            rank.send(signal.SIGTERM)
        until = time.monotonic() + self.grace
        while self._running and time.monotonic() < until and signals.empty():
            self._collect(_TICK)
        for rank in self._running:
            self.log(f"rank {rank.rank} does not end: SIGKILL")
            rank.kill()
        while not self._all_finished:
            self._collect(_TICK)
        return failures

    def _show_stacks(self) -> list[Failure]:
        """Log all phases, and have the running ranks show their stacks and exit."""
        now = time.monotonic()
        for rank in self.ranks:
            status = self.page.status(rank.local_rank)
            if status.phase:
                state = f"{status.phase}, for {now - status.since:.1f} s"
                self.log(f"rank {rank.rank} was in: {state}")
        self.page.command = Command.SHOW_STACKS_AND_END
        failures = self._collect(_STACKS)
        for rank in self._running:
            rank.send(signal.SIGABRT)  # shows them without the interpreter's help
        self._collect(_BEFORE_ABORT)
        # Of the ranks that exit now, only one that failed by itself may be the first.
        return [one for one in failures if one.failed_at]


def variables(
    plan: Plan, local_rank: int, coordinator: tuple[str, int]
) -> dict[str, str]:
    """The environment variables from which a rank detects its place in the run.

    Includes those of torchrun, so that a program that reads them sees its own rank even
    if the launcher was given the machine's first rank in them.
    """
    rank, (host, port) = plan.first_rank + local_rank, coordinator
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": plan.world_size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": plan.num_local,
        "TESSERA_RANK": rank,
        "TESSERA_WORLD_SIZE": plan.world_size,
        "TESSERA_LOCAL_RANK": local_rank,
        "TESSERA_LOCAL_SIZE": plan.num_local,
        "MASTER_PORT": port,
        "PYTHONUNBUFFERED": 1,
        "PYTHONFAULTHANDLER": 1,
    }
    return {
        **{name: str(number) for name, number in numbers.items()},
        "MASTER_ADDR": host,
        "TESSERA_COORDINATOR": f"{host}:{port}",
    }


def free_port() -> int:
    """A free port of the loopback interface, of which the next one is free too."""
    while True:
        with socket.create_server((LOOPBACK, 0)) as first:
            port: int = first.getsockname()[1]
            try:
                socket.create_server((LOOPBACK, port + 1)).close()
            except (OSError, OverflowError):
                continue
            return port
