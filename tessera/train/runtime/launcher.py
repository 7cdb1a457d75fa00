# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of one machine, watches them, and ends all when one of them fails.

The launcher does not know what its ranks compute: it reads their output, their exit
codes and the phases that they report. So it can end a rank that can no longer end
itself, and tell which rank failed first.
"""

import queue
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from random import SystemRandom
from typing import Final, TypeAlias

from tessera.train.files.file_locks import lock
from tessera.train.runtime import exit_codes
from tessera.train.runtime.cluster import LOOPBACK
from tessera.train.runtime.exit_codes import STOP_SIGNALS, handled_signals
from tessera.train.runtime.launcher_protocol import (
    LOCK_FILE,
    end_attempt,
    launcher_variables,
)
from tessera.train.runtime.rank_failures import (
    Failure,
    describe_exit,
    first_failure,
    relevant_lines,
)
from tessera.train.runtime.rank_process import RankProcess

# A rank that has ended, or the number of a signal.
Event: TypeAlias = RankProcess | int

FORWARDED: Final = (*STOP_SIGNALS, signal.SIGHUP, signal.SIGUSR1)
# Exit codes after which the same command would fail in the same way.
_FINAL: Final = (exit_codes.USER_ERROR, exit_codes.WRONG_VALUES)
# Ports in a row: one for programs that use MASTER_PORT, those of JAX's coordinator, and
# of the rendezvous.
_NUM_PORTS: Final = 3
# Below the ports that systems choose for outgoing connections: one of those could take
# a port before its rank listens there, or a rank that retries connect to itself.
_PORTS: Final = 10_000, 32_000

_TICK: Final = 0.1
# How long after the first failure one may be seen that happened before it.
_SETTLE: Final = 0.5
# How late a rank's own watchdog may be, and how long its stacks may take.
_LATE: Final = 5.0
_BEFORE_KILL: Final = 2.0


@dataclass(frozen=True)
class LaunchPlan:
    """What to start on this machine.

    Attributes:
      command: The program of every rank.
      num_ranks: Ranks to start here.
      max_restarts: How often to start all ranks again after a failure.
      grace: Seconds from asking a rank to end to killing it.
      shows_help: Whether the program only shows its help, which one process can do.
    """

    command: tuple[str, ...]
    num_ranks: int
    max_restarts: int = 0
    grace: float = 30.0
    shows_help: bool = False


class Launcher:
    """Runs a plan: ``Launcher(plan, os.environ).run()`` returns the exit code.

    Args:
      plan: What to start.
      environ: The environment variables that the ranks inherit.
    """

    def __init__(self, plan: LaunchPlan, environ: Mapping[str, str]) -> None:
        self._plan, self._environ = plan, environ
        self._output = threading.Lock()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def run(self) -> int:
        """Start the ranks, and again after a failure if the plan allows it.

        Returns:
          0, or the exit code of the rank that failed first: 128 and the signal's number
          for one that was killed.
        """
        plan = self._plan
        with (
            tempfile.TemporaryDirectory(prefix="tessera-") as name,
            (Path(name) / LOCK_FILE).open("wb") as lock_file,
            handled_signals(FORWARDED, lambda number, _: self._events.put(number)),
        ):
            lock(lock_file.fileno())
            for number in range(plan.max_restarts + 1):
                attempt = self._start(number, Path(name))
                failure = attempt.watch()
                if failure is None:
                    self._note_unjoined(attempt)
                    return exit_codes.SUCCESS
                code = exit_codes.shell_exit_code(failure.returncode)
                if failure.is_requested_stop:
                    self._log(f"all ranks ended as asked: exit code {code}")
                    return code
                self._report(attempt, failure)
                is_last = number == plan.max_restarts or code in _FINAL
                if is_last or attempt.stop_signal is not None:
                    return code
                self._log(f"restart {number + 1} of {plan.max_restarts}")
        raise AssertionError("the last attempt returns")

    def _start(self, number: int, folder: Path) -> "Attempt":
        plan = self._plan
        port = free_port()
        last = plan.num_ranks - 1
        names = f"ranks 0 to {last}" if last else "rank 0"
        nth = f", attempt {number + 1}" if number else ""
        self._log(f"starting {names}{nth}")
        end = partial(end_attempt, folder, number)
        attempt = Attempt(self._events, plan.grace, self._log, end)
        for rank in range(plan.num_ranks):
            environment = {
                **self._environ,
                **rank_variables(rank, plan.num_ranks, port),
                **launcher_variables(folder, number),
            }
            show, put = self._show, self._events.put
            process = RankProcess(plan.command, environment, rank, show, put)
            attempt.ranks.append(process)
        return attempt

    def _note_unjoined(self, attempt: "Attempt") -> None:
        """Log that the ranks may have computed each for itself."""
        if len(attempt.ranks) > 1 and not any(r.status.phase for r in attempt.ranks):
            self._log(
                "no rank used tessera's joined(...): unless the program connects its "
                "processes itself, each has run alone, on its own devices"
            )

    def _report(self, attempt: "Attempt", failure: Failure) -> None:
        """Log the failure; what a person has to read comes last."""
        first = attempt.ranks[failure.rank]
        others = [
            f"rank {rank.rank}: {describe_exit(rank.returncode)}"
            for rank in attempt.ranks
            if rank is not first
        ]
        if others:
            self._log("the others, in consequence: " + "; ".join(others))
        seconds = failure.ended_at - first.started_at
        self._log(f"failed first, {seconds:.1f} s after its start: {failure}")
        prefix = f"[rank {failure.rank}] "
        for line in relevant_lines(first.last_errors()):
            self._show(2, f"{prefix}{line}\n".encode(errors="backslashreplace"))

    def _show(self, stream: int, line: bytes) -> None:
        target = (sys.stdout if stream == 1 else sys.stderr).buffer
        with self._output:
            target.write(line)
            target.flush()

    def _log(self, text: str) -> None:
        self._show(2, f"[launch] {text}\n".encode(errors="backslashreplace"))


@dataclass
class Attempt:
    """The ranks of one attempt, from their start to the exit of the last.

    Attributes:
      events: What happens to them, and the signals that the launcher receives.
      grace: Seconds from asking a rank to end to killing it.
      log: Shows a line of the launcher's.
      end: Has all ranks that use ``joined`` end at once.
      ranks: The processes.
      failures: Those that the launcher did not cause.
      stop_signal: The signal by which the launcher was asked to end.
    """

    events: "queue.SimpleQueue[Event]"
    grace: float
    log: Callable[[str], None]
    end: Callable[[], None]
    ranks: list[RankProcess] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    stop_signal: int | None = None
    _kill_at: float = inf
    # Since when ranks end because the launcher asked, or because it killed them.
    _ending_since: float = inf
    _killed_since: float = inf

    def watch(self) -> Failure | None:
        """Wait for all ranks; the first failure, or None."""
        try:
            while not all(rank.is_finished for rank in self.ranks):
                with suppress(queue.Empty):
                    event = self.events.get(timeout=_TICK)
                    if isinstance(event, RankProcess):
                        self._finish(event)
                    else:
                        self._forward(event)
                self._end_others()
                self._end_late_ranks()
                if time.monotonic() > self._kill_at and self._killed_since == inf:
                    self.log(
                        f"not ended {self.grace:g} s after they were asked: SIGKILL"
                    )
                    self._kill()
        finally:
            self._kill()
        return first_failure(self.failures) if self.failures else None

    @property
    def _running(self) -> list[RankProcess]:
        return [rank for rank in self.ranks if rank.ended_at is None]

    def _kill(self) -> None:
        self._killed_since = min(self._killed_since, time.monotonic())
        for rank in self._running:
            rank.kill()

    def _finish(self, rank: RankProcess) -> None:
        """Record how a rank ended."""
        rank.finish()
        code = exit_codes.STALLED if rank.is_late else rank.returncode
        if code == 0 or (self.failures and self._is_ended_by_launcher(rank)):
            return
        if self.stop_signal is not None and code == -self.stop_signal:
            # It has no handler, or none yet: it stopped as requested all the same.
            code = STOP_SIGNALS.get(signal.Signals(self.stop_signal), code)
        assert rank.ended_at is not None
        status = rank.status
        self.failures.append(
            Failure(rank.rank, code, rank.ended_at, status.failed_at, status.phase)
        )
        # After a requested stop, the others were asked too, and may have to save first.
        self._kill_at = min(self._kill_at, time.monotonic() + self.grace)

    def _is_ended_by_launcher(self, rank: RankProcess) -> bool:
        """Whether a rank ended because the launcher ended it: it did not fail.

        Nothing that the launcher asks a rank for ends it by SIGKILL.
        """
        assert rank.ended_at is not None
        asked = rank.ended_at > self._ending_since
        killed = rank.ended_at > self._killed_since
        return killed or (asked and rank.returncode != -signal.SIGKILL)

    def _forward(self, number: int) -> None:
        """Forward a signal; a second one that asks to end kills."""
        name = signal.Signals(number).name
        if number == signal.SIGUSR1:
            self.log(f"{name} to all ranks")
        elif self.stop_signal is None:
            self.stop_signal = number
            self._kill_at = time.monotonic() + self.grace
            self.log(f"{name} to all ranks, which have {self.grace:g} s to end")
        else:
            self.log(f"a second {name}: killing all ranks")
            self._kill()
        for rank in self._running:
            rank.send(number)

    def _end_others(self) -> None:
        """End the ranks that still run after a failure, unless all stop by request.

        Waits for a moment first: the failure that caused the others may be seen later.
        """
        real = [failure for failure in self.failures if not failure.is_requested_stop]
        if self._ending_since < inf or not real:
            return
        now = time.monotonic()
        is_settled = all(rank.is_finished for rank in self.ranks)
        if not is_settled and now < real[0].ended_at + _SETTLE:
            return
        self._ending_since = now
        first = first_failure(real)
        self.log(str(first))
        self._kill_at = time.monotonic() + self.grace
        number = signal.SIGTERM
        if first.returncode == exit_codes.STALLED:
            self._log_phases()
            number = signal.SIGABRT  # shows the stacks
        else:
            self.end()
        for rank in self._running:
            rank.send(number)

    def _log_phases(self) -> None:
        for rank in self.ranks:
            if rank.status.phase:
                self.log(f"rank {rank.rank} was in: {rank.status}")

    def _end_late_ranks(self) -> None:
        """End ranks whose own watchdog should have ended them, and could not.

        By SIGABRT, whose handler shows the stacks without the interpreter's help.
        """
        now = time.monotonic()
        for rank in self._running:
            status = rank.status
            late = now - status.since - status.deadline
            if late > _LATE and not rank.is_late:
                rank.is_late = True
                self.log(
                    f"rank {rank.rank} has been in phase {status.phase!r} for "
                    f"{now - status.since:.1f} s, of {status.deadline:g} s, and its "
                    "watchdog does not act: SIGABRT"
                )
                rank.send(signal.SIGABRT)
            elif late > _LATE + _BEFORE_KILL:
                rank.kill()


def rank_variables(rank: int, count: int, port: int) -> dict[str, str]:
    """The environment variables from which a rank detects its run: torchrun's."""
    values = {
        "RANK": rank,
        "WORLD_SIZE": count,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": count,
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": port,
        "PYTHONUNBUFFERED": 1,
        "PYTHONFAULTHANDLER": 1,
    }
    return {name: str(value) for name, value in values.items()}


def free_port() -> int:
    """A free port of the loopback interface, of which the next two are free too."""
    while True:
        # Not drawn by a generator that a run may have seeded, as all runs would then
        # take the same ports.
        port = SystemRandom().randrange(*_PORTS)
        try:
            for each in range(port, port + _NUM_PORTS):
                socket.create_server((LOOPBACK, each)).close()
        except OSError:
            continue
        return port
