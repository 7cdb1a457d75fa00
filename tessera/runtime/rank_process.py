# SPDX-License-Identifier: Apache-2.0
"""One rank as its launcher sees it: a process, its output line by line, its end."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

_START: Final = Path(__file__).parent / "start_rank.py"
_LINES_KEPT: Final = 400
_LONGEST_LINE: Final = 64 * 1024


@dataclass(frozen=True)
class Ended:
    """The end of a rank's process.

    Attributes:
      local_rank: Which one.
      at: When, by ``time.monotonic``.
    """

    local_rank: int
    at: float


class Rank:
    """A process that runs in a session of its own, and ends with this one.

    The terminal's Ctrl-C reaches the launcher alone, which decides what to do with it,
    and all that the rank starts can be ended together. It ends with the thread that
    makes it, which is the main one.

    Args:
      command: What to run.
      environment: All of its environment variables.
      rank: Its number in the run.
      local_rank: Its number on this machine.
      show: Takes the stream, 1 or 2, and a line, ``[rank 3] …``.
      tell: Called from a thread when the process has ended.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        rank: int,
        local_rank: int,
        show: Callable[[int, bytes], None],
        tell: Callable[[Ended], None],
    ) -> None:
        self.rank, self.local_rank = rank, local_rank
        self.ended: Ended | None = None
        self.started_at = time.monotonic()
        self._show, self._tell = show, tell
        self._kept: dict[int, deque[bytes]] = {
            stream: deque(maxlen=_LINES_KEPT) for stream in (1, 2)
        }
        start = (sys.executable, "-I", "-S", str(_START), str(os.getpid()))
        self._process = subprocess.Popen(
            (*start, *command),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._readers = [
            threading.Thread(target=self._read, args=each, daemon=True)
            for each in ((1, self._process.stdout), (2, self._process.stderr))
        ]
        for thread in (
            *self._readers,
            threading.Thread(target=self._wait, daemon=True),
        ):
            thread.start()

    @property
    def pid(self) -> int:
        """Its process, which is the leader of its session."""
        return self._process.pid

    @property
    def returncode(self) -> int:
        """How it ended, as ``Popen`` has it; only of one that did."""
        assert self._process.returncode is not None
        return self._process.returncode

    @property
    def is_finished(self) -> bool:
        """Whether it ended and ``finish`` was called."""
        return self._process.returncode is not None

    def send(self, number: int) -> None:
        """Send a signal to the rank, and to nothing that it started."""
        if self.ended is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End the rank and all that it started, at once."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def finish(self) -> None:
        """After its end: end what it left behind, and read its output to the end."""
        assert self.ended is not None
        # Not yet reaped, so that its number is still that of its own group.
        self.kill()
        self._process.wait()
        for thread in self._readers:
            thread.join(timeout=2)

    def last_lines(self, stream: int) -> list[str]:
        """The last lines of one of its streams, 1 or 2."""
        return [line.decode(errors="backslashreplace") for line in self._kept[stream]]

    def _read(self, stream: int, pipe: IO[bytes]) -> None:
        prefix = f"[rank {self.rank}] ".encode()
        with pipe:
            while line := pipe.readline(_LONGEST_LINE):
                line = line.rstrip(b"\r\n")
                self._kept[stream].append(line)
                self._show(stream, prefix + line + b"\n")

    def _wait(self) -> None:
        if hasattr(os, "waitid"):
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        else:
            self._process.wait()
        self.ended = Ended(self.local_rank, time.monotonic())
        self._tell(self.ended)
