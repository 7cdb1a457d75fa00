# SPDX-License-Identifier: Apache-2.0
"""What ``tessera.launch`` tells its ranks beside their place, and whether it lives."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tessera.file_locks import is_locked

STATUS: Final = "status"
# The launcher holds a lock of it for as long as it lives.
ALIVE: Final = "launcher"


@dataclass(frozen=True)
class Launched:
    """The launcher of this process.

    Attributes:
      folder: Its own, private and there for all attempts; the ranks' page is in it.
      launcher: Its process.
      local_rank: This rank's number on the page.
      attempt: How often it has started the run before.
      is_rank: Whether it started this process itself. A program that a rank starts
        inherits the variables, and is none.
    """

    folder: Path
    launcher: int
    local_rank: int
    attempt: int
    is_rank: bool

    @classmethod
    def find(cls, environ: Mapping[str, str]) -> "Launched | None":
        """From the environment variables; None in a process of any other origin."""
        names = ("LAUNCHER", "LOCAL_RANK", "ATTEMPT")
        given = [environ.get(f"TESSERA_{name}", "") for name in names]
        path = environ.get("TESSERA_STATUS")
        if path is None or not all(value.isdecimal() for value in given):
            return None
        launcher, local_rank, attempt = map(int, given)
        is_rank = os.getppid() == launcher
        return cls(Path(path).parent, launcher, local_rank, attempt, is_rank)

    @property
    def has_launcher(self) -> bool:
        """Whether the launcher lives; without it, nobody ends this process."""
        if os.getppid() == self.launcher:
            return True
        try:
            return is_locked(self.folder / ALIVE) is not False
        except OSError:
            return False

    def first_shared(self, shared: str) -> str:
        """What rank 0 shares: that of the first attempt, which is kept for the next."""
        kept = self.folder / "shared"
        if self.attempt and kept.exists():
            return kept.read_text(encoding="utf-8")
        kept.write_text(shared, encoding="utf-8")
        return shared
