# SPDX-License-Identifier: Apache-2.0
"""A page of memory that the launcher and its ranks share: who is in which phase.

A file in a private folder, mapped by every process. A rank writes its own record, which
costs about a microsecond, and the launcher reads all of them, whatever state the rank's
interpreter is in. The launcher writes one word, which each rank reads: to end.

Times are of ``time.monotonic``, which has one origin for all processes of a machine.
"""

import mmap
import os
import struct
from dataclasses import dataclass
from enum import IntEnum
from math import inf
from pathlib import Path
from typing import Final

_MAGIC: Final = b"TSR1"
_HEADER: Final = struct.Struct("=4sII")
_RECORD: Final = struct.Struct("=ddd64s")
_FAILED: Final = struct.Struct("=d")
_RECORD_SIZE: Final = 128
_FIRST_RECORD: Final = 64


class Command(IntEnum):
    """What the launcher asks of every rank."""

    CONTINUE = 0
    END = 1
    SHOW_STACKS_AND_END = 2


@dataclass(frozen=True)
class Status:
    """What a rank last said of itself.

    Attributes:
      phase: ``"step 12"``; empty before it said anything.
      since: When it began.
      deadline: Seconds that it may take; infinite where it may take any.
      failed_at: When it met an error that it did not survive; 0 if it did not.
    """

    phase: str
    since: float
    deadline: float
    failed_at: float


class StatusPage:
    """The records of the ranks of one machine.

    Args:
      path: The file; ``StatusPage.create`` makes it.
    """

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        magic, self.num_ranks, _ = _HEADER.unpack_from(self._map)
        if magic != _MAGIC:
            raise ValueError(f"{path} is no status page")
        self.path = path

    @classmethod
    def create(cls, path: Path, num_ranks: int) -> "StatusPage":
        """Make the file of a page, for the user alone, or blank the one that is there.

        Args:
          path: Where.
          num_ranks: Ranks on this machine.
        """
        size = _FIRST_RECORD + num_ranks * _RECORD_SIZE
        blank = _HEADER.pack(_MAGIC, num_ranks, Command.CONTINUE).ljust(size, b"\0")
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(blank)
        return cls(path)

    def enter(self, rank: int, phase: str, since: float, deadline: float) -> None:
        """Say that a rank of this machine is in a phase."""
        place = _FIRST_RECORD + rank * _RECORD_SIZE
        _RECORD.pack_into(
            self._map, place, self._failed_at(rank), since, deadline, phase.encode()
        )

    def fail(self, rank: int, at: float) -> None:
        """Say that a rank of this machine met its end; the first time counts."""
        if not self._failed_at(rank):
            _FAILED.pack_into(self._map, _FIRST_RECORD + rank * _RECORD_SIZE, at)

    def status(self, rank: int) -> Status:
        """What a rank of this machine last said."""
        place = _FIRST_RECORD + rank * _RECORD_SIZE
        failed_at, since, deadline, phase = _RECORD.unpack_from(self._map, place)
        said = phase.rstrip(b"\0").decode(errors="replace")
        return Status(said, since, deadline if said else inf, failed_at)

    @property
    def command(self) -> Command:
        """What the launcher asks."""
        return Command(_HEADER.unpack_from(self._map)[2])

    @command.setter
    def command(self, command: Command) -> None:
        _HEADER.pack_into(self._map, 0, _MAGIC, self.num_ranks, command)

    def _failed_at(self, rank: int) -> float:
        assert 0 <= rank < self.num_ranks, f"no rank {rank} on this machine"
        place = _FIRST_RECORD + rank * _RECORD_SIZE
        return _FAILED.unpack_from(self._map, place)[0]
