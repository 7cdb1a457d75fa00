# SPDX-License-Identifier: Apache-2.0
"""Decides which of several ranks failed first, and which lines of its output to show.

One rank's failure makes others fail: connections break, and JAX aborts the processes
that notice. All of this takes a fraction of a second, and the launcher may see the
first rank's exit after those of the others.
"""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

from tessera.train.runtime import exit_codes

# A process that crashes reports nothing, so others may report their errors before its
# exit is seen. SIGABRT is how JAX ends a process because another one died.
_HEAD_START: Final = 1.0
_CONSEQUENCES: Final = (signal.SIGABRT, signal.SIGTERM, signal.SIGINT)
_TRACEBACK: Final = "Traceback (most recent call last):"
_CHAIN: Final = ("During handling of the above", "The above exception was the direct")
_LAST_LINES: Final = 30


@dataclass(frozen=True)
class Failure:
    """A rank that exited with another code than 0.

    Attributes:
      rank: Its number.
      returncode: As ``Popen`` has it: negative for a signal.
      ended_at: When the launcher saw its exit.
      failed_at: When the rank reported the failure; 0 if it did not.
      phase: Its last phase.
    """

    rank: int
    returncode: int
    ended_at: float
    failed_at: float = 0.0
    phase: str = ""

    @property
    def is_requested_stop(self) -> bool:
        """Whether the rank was asked to stop, and did so in order."""
        return self.returncode in (exit_codes.REQUEUE, exit_codes.INTERRUPTED)

    @property
    def _order(self) -> float:
        if self.failed_at:
            return self.failed_at
        if self.returncode == -signal.SIGKILL:
            # No failure of another rank does this, so however late it is seen.
            return -inf
        if self.returncode == exit_codes.TERMINATED:
            # It ended because another rank did, which may be seen later.
            return self.ended_at + _HEAD_START
        crashed = self.returncode < 0 and -self.returncode not in _CONSEQUENCES
        return self.ended_at - (_HEAD_START if crashed else 0.0)

    def __str__(self) -> str:
        phase = f" in phase {self.phase!r}" if self.phase else ""
        return f"rank {self.rank}: {describe_exit(self.returncode)}{phase}"


def first_failure(failures: Sequence[Failure]) -> Failure:
    """The failure that caused the others; a requested stop only if all are."""
    return min(failures, key=lambda one: (one.is_requested_stop, one._order))


def describe_exit(returncode: int) -> str:
    """How a process ended: ``"exit code 1"``, ``"killed by SIGKILL"``."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"killed by signal {-returncode}"


def relevant_lines(errors: Sequence[str]) -> list[str]:
    """The part of a rank's standard error that explains its exit.

    The last traceback with its causes, up to the end; without a traceback, the last
    coded error, or else the last lines.

    Args:
      errors: Lines of standard error.
    """
    starts = [at for at, line in enumerate(errors) if line.startswith(_TRACEBACK)]
    if not starts:
        coded = [at for at, line in enumerate(errors) if re.match(r"\[T\d{3}\] ", line)]
        return list(errors[coded[-1] if coded else -_LAST_LINES :])
    start = starts.pop()
    while starts and any(
        line.startswith(_CHAIN) for line in errors[starts[-1] : start]
    ):
        start = starts.pop()
    return list(errors[start:])
