# SPDX-License-Identifier: Apache-2.0
"""How the launcher and its ranks communicate: variables, a lock, and a status page.

The status page is a file in a private folder, mapped by every process. A rank writes
its own record in about a microsecond, and the launcher reads all records, whatever
state the rank's interpreter is in. The launcher writes one word that each rank reads: a
command.

Times come from ``time.monotonic``, which has one origin for all processes of a machine.
"""

import ctypes
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from math import inf
from pathlib import Path
from typing import Final

from tessera.file_locks import is_locked

STATUS_FILE: Final = "status"
# The launcher holds a lock on this file for as long as it lives.
LOCK_FILE: Final = "launcher"
_MAGIC: Final = b"TSR2"


@dataclass(frozen=True)
class ParentLauncher:
    """The launcher that started this process, or the rank that started it.

    Attributes:
      folder: The launcher's private folder, the same in all attempts.
      pid: The launcher's process.
      local_rank: The index of this rank's record on the status page.
      attempt: Number of earlier attempts of the run.
      is_rank: Whether the launcher itself started this process. A program that a rank
        starts inherits the variables, and is no rank.
    """

    folder: Path
    pid: int
    local_rank: int
    attempt: int
    is_rank: bool

    @classmethod
    def find(cls, environ: Mapping[str, str]) -> "ParentLauncher | None":
        """Read the environment variables; None if no launcher set them."""
        names = ("LAUNCHER", "LOCAL_RANK", "ATTEMPT")
        values = [environ.get(f"TESSERA_{name}", "") for name in names]
        path = environ.get("TESSERA_STATUS")
        if path is None or not all(value.isdecimal() for value in values):
            return None
        pid, local_rank, attempt = map(int, values)
        return cls(Path(path).parent, pid, local_rank, attempt, os.getppid() == pid)

    @property
    def is_alive(self) -> bool:
        """Whether the launcher is alive; without it, nothing would end this process."""
        if os.getppid() == self.pid:
            return True
        try:
            return is_locked(self.folder / LOCK_FILE) is not False
        except OSError:
            return False

    def shared_of_first_attempt(self, shared: str) -> str:
        """What rank 0 shared in the first attempt; stores ``shared`` if this is it."""
        file = self.folder / "shared"
        if self.attempt and file.exists():
            return file.read_text(encoding="utf-8")
        file.write_text(shared, encoding="utf-8")
        return shared


class Command(IntEnum):
    """What the launcher tells every rank to do."""

    CONTINUE = 0
    END = 1
    SHOW_STACKS_AND_END = 2


@dataclass(frozen=True)
class Status:
    """The last state that a rank reported.

    Attributes:
      phase: ``"step 12"``; empty before the first report.
      since: When the phase began.
      deadline: Seconds that the phase may take; infinite without a limit.
      failed_at: When the rank hit a fatal error; 0 if it did not.
    """

    phase: str
    since: float
    deadline: float
    failed_at: float


class _Header(ctypes.Structure):
    _fields_ = (
        ("magic", ctypes.c_char * 4),
        ("num_ranks", ctypes.c_uint32),
        ("command", ctypes.c_uint32),
        ("padding", ctypes.c_char * 52),
    )


class _Record(ctypes.Structure):
    _fields_ = (
        ("failed_at", ctypes.c_double),
        ("since", ctypes.c_double),
        ("deadline", ctypes.c_double),
        ("phase", ctypes.c_char * 104),
    )


class StatusPage:
    """The records of the ranks of one machine.

    Args:
      path: The file; ``StatusPage.create`` makes it.
    """

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        self.path, self._header = path, _Header.from_buffer(memory)
        if self._header.magic != _MAGIC:
            raise ValueError(f"{path} is not a status page")
        records = _Record * self._header.num_ranks
        self._records = records.from_buffer(memory, ctypes.sizeof(_Header))

    @classmethod
    def create(cls, path: Path, num_ranks: int) -> "StatusPage":
        """Create an empty page, readable by the user alone; replaces an existing one.

        Args:
          path: Where.
          num_ranks: Ranks on this machine.
        """
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(_Header(_MAGIC, num_ranks, Command.CONTINUE))
            file.write((_Record * num_ranks)())
        return cls(path)

    def enter(self, rank: int, phase: str, since: float, deadline: float) -> None:
        """Report that a rank of this machine entered a phase."""
        record = self._records[rank]
        # The launcher reads at any moment, and must not apply a new deadline to the
        # start of the phase before.
        record.deadline = inf
        record.since = since
        record.phase = phase.encode()[: _Record.phase.size]
        record.deadline = deadline

    def fail(self, rank: int, at: float) -> None:
        """Report that a rank of this machine failed; only the first report counts."""
        record = self._records[rank]
        record.failed_at = record.failed_at or at

    def status(self, rank: int) -> Status:
        """The last report of a rank of this machine."""
        record = self._records[rank]
        deadline = record.deadline  # before ``since``: see ``enter``
        phase = record.phase.decode(errors="replace")
        limit = deadline if phase else inf
        return Status(phase, record.since, limit, record.failed_at)

    @property
    def num_ranks(self) -> int:
        """Ranks on this machine."""
        return self._header.num_ranks

    @property
    def command(self) -> Command:
        """The launcher's current command."""
        return Command(self._header.command)

    @command.setter
    def command(self, command: Command) -> None:
        self._header.command = command
