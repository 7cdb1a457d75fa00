# SPDX-License-Identifier: Apache-2.0
"""Which of several ranks failed first, and what a person should read of it.

One rank's failure makes others fail: connections break, and JAX aborts the processes
that notice. All of that comes within a fraction of a second, and the exit of the first
may be seen after those of the others.
"""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tessera.runtime import exit_codes

# A process that is killed writes nothing, so others may write of their own errors
# before its end is seen. SIGABRT is how JAX ends a process for the death of another.
_HEAD_START: Final = 1.0
_CONSEQUENCES: Final = (signal.SIGABRT, signal.SIGTERM, signal.SIGINT)
_TRACEBACK: Final = "Traceback (most recent call last):"
_CHAIN: Final = ("During handling of the above", "The above exception was the direct")
_LINES_OF_TRACEBACK: Final = 80
_LINES_OTHERWISE: Final = 30


@dataclass(frozen=True)
class Failure:
    """A rank that ended otherwise than by exit code 0.

    Attributes:
      rank: Which.
      returncode: As ``Popen`` has it: negative for a signal.
      ended_at: When its end was seen.
      failed_at: When the rank itself said that it failed; 0 if it said nothing.
      phase: The last that it was in.
    """

    rank: int
    returncode: int
    ended_at: float
    failed_at: float = 0.0
    phase: str = ""

    @property
    def is_as_asked(self) -> bool:
        """Whether the rank had been asked to end, and ended in good order."""
        return self.returncode in (exit_codes.REQUEUE, exit_codes.INTERRUPTED)

    @property
    def _order(self) -> float:
        if self.failed_at:
            return self.failed_at
        killed = self.returncode < 0 and -self.returncode not in _CONSEQUENCES
        return self.ended_at - _HEAD_START * killed

    def __str__(self) -> str:
        where = f" in phase {self.phase!r}" if self.phase else ""
        return f"rank {self.rank}: {how_it_ended(self.returncode)}{where}"


def first_of(failures: Sequence[Failure]) -> Failure:
    """The failure that the others come from; one as asked only where all are."""
    return min(failures, key=lambda failure: (failure.is_as_asked, failure._order))


def how_it_ended(returncode: int) -> str:
    """In words: ``"exit code 1"``, ``"killed by SIGKILL"``."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"killed by signal {-returncode}"


def what_to_read(errors: Sequence[str]) -> list[str]:
    """The part of a rank's standard error that says why it ended.

    The last traceback, with those that it names as its causes, to the end; the last
    lines where there is none.

    Args:
      errors: Lines of standard error.
    """
    starts = [at for at, line in enumerate(errors) if line.startswith(_TRACEBACK)]
    if not starts:
        coded = [at for at, line in enumerate(errors) if re.match(r"\[T\d{3}\] ", line)]
        return list(errors[coded[-1] if coded else -_LINES_OTHERWISE :])
    start = starts.pop()
    while starts and any(
        line.startswith(_CHAIN) for line in errors[starts[-1] : start]
    ):
        start = starts.pop()
    shown = list(errors[start:])
    if len(shown) <= _LINES_OF_TRACEBACK:
        return shown
    half = _LINES_OF_TRACEBACK // 2
    return [*shown[:half], f"… {len(shown) - 2 * half} lines …", *shown[-half:]]
