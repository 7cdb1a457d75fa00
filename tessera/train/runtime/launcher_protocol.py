# SPDX-License-Identifier: Apache-2.0
"""How the launcher and its ranks communicate.

A rank writes a line to a pipe for each phase that it begins, so that the launcher knows
how long it may take, whatever state the rank's interpreter is in. In the other
direction a rank looks four times a second whether its launcher still runs, which locks
a file in a private folder, and whether it has made a file there that ends the attempt.

Times come from ``time.monotonic``, which has one origin for all processes of a machine.
"""

import os
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Final, Self

from tessera.train.files.file_locks import is_locked

# The launcher holds a lock on this file for as long as it lives.
LOCK_FILE: Final = "launcher"
_END_FILE: Final = "end"
_MAX_PHASE: Final = 200


@dataclass(frozen=True)
class Status:
    """The last state that a rank reported.

    Attributes:
      phase: ``"step 12"``; empty before the first report.
      since: When the phase began.
      deadline: Seconds that the phase may take; infinite without a limit.
      failed_at: When the rank hit a fatal error; 0 if it did not.
    """

    phase: str = ""
    since: float = 0.0
    deadline: float = inf
    failed_at: float = 0.0

    def __str__(self) -> str:
        return f"{self.phase}, for {time.monotonic() - self.since:.1f} s"

    def as_line(self) -> bytes:
        """One line, which a pipe takes as a whole."""
        numbers = self.since, self.deadline, self.failed_at
        words = *map(repr, numbers), self.phase[:_MAX_PHASE]
        return f"{' '.join(words)}\n".encode(errors="replace")

    @classmethod
    def read(cls, line: bytes) -> Self:
        """Parse a line."""
        *numbers, phase = line.decode(errors="replace").rstrip("\n").split(" ", 3)
        return cls(phase, *map(float, numbers))


@dataclass(frozen=True)
class ParentLauncher:
    """The launcher that started this process, or the rank that started it.

    Attributes:
      folder: The launcher's private folder, the same in all attempts.
      pid: The launcher's process.
      attempt: Number of earlier attempts of the run.
      status_pipe: The descriptor to which a rank writes its status.
      is_rank: Whether the launcher itself started this process. A program that a rank
        starts inherits the variables, and is no rank.
    """

    folder: Path
    pid: int
    attempt: int
    status_pipe: int
    is_rank: bool

    @classmethod
    def find(cls, environ: Mapping[str, str]) -> Self | None:
        """Read the environment variables; None if no launcher set them."""
        names = ("LAUNCHER", "ATTEMPT", "STATUS")
        values = [environ.get(f"TESSERA_{name}", "") for name in names]
        folder = environ.get("TESSERA_FOLDER")
        if folder is None or not all(value.isdecimal() for value in values):
            return None
        pid, attempt, pipe = map(int, values)
        return cls(Path(folder), pid, attempt, pipe, os.getppid() == pid)

    def report(self, status: Status) -> None:
        """Tell the launcher the status of this rank."""
        if self.is_rank:
            # A program between the launcher and this one may have closed the pipe.
            with suppress(OSError):
                if stat.S_ISFIFO(os.fstat(self.status_pipe).st_mode):
                    os.write(self.status_pipe, status.as_line())

    def reason_to_end(self) -> str | None:
        """Why this process has to end now; None while the attempt goes on."""
        if (self.folder / f"{_END_FILE}.{self.attempt}").exists():
            return "the launcher ends this rank"
        is_alive = os.getppid() == self.pid
        with suppress(OSError):
            is_alive = is_alive or is_locked(self.folder / LOCK_FILE) is not False
        # Nothing else would end it.
        return None if is_alive else "the launcher is gone, and this rank ends with it"

    def shared_of_first_attempt(self, shared: str) -> str:
        """What rank 0 shared in the first attempt; stores ``shared`` if this is it."""
        if (first := self.shared_before()) is not None:
            return first
        (self.folder / "shared").write_text(shared, encoding="utf-8")
        return shared

    def shared_before(self) -> str | None:
        """What rank 0 shared in the first attempt, if this is a later one."""
        file = self.folder / "shared"
        if self.attempt and file.exists():
            return file.read_text(encoding="utf-8")
        return None


def launcher_variables(folder: Path, attempt: int) -> dict[str, str]:
    """The environment variables by which ranks find this process, their launcher."""
    return {
        "TESSERA_FOLDER": str(folder),
        "TESSERA_LAUNCHER": str(os.getpid()),
        "TESSERA_ATTEMPT": str(attempt),
    }


def end_attempt(folder: Path, attempt: int) -> None:
    """Have all ranks of an attempt end, whatever signals they handle."""
    (folder / f"{_END_FILE}.{attempt}").touch()
