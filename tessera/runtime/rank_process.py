# SPDX-License-Identifier: Apache-2.0
"""A rank as the launcher's child process: its output line by line, and its exit."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Final

_START: Final = Path(__file__).parent / "start_rank.py"
_MAX_LINES: Final = 400
_MAX_LINE: Final = 64 * 1024


class RankProcess:
    """A process in a session of its own, which ends with this one.

    The terminal's Ctrl-C reaches only the launcher, which decides what to do, and all
    that the rank starts can be killed together. The rank ends with the thread that
    starts it, which is the main one.

    Args:
      command: What to run.
      environment: All of its environment variables.
      rank: Its number in the run.
      local_rank: Its number on this machine.
      show: Takes the stream, 1 or 2, and a line, ``[rank 3] …``.
      on_exit: Called with ``local_rank``, from a thread, when the process has ended.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        rank: int,
        local_rank: int,
        show: Callable[[int, bytes], None],
        on_exit: Callable[[int], None],
    ) -> None:
        self.rank, self.local_rank = rank, local_rank
        self.ended_at: float | None = None
        self.started_at = time.monotonic()
        self._show, self._on_exit = show, on_exit
        self._lines: dict[int, deque[bytes]] = {
            stream: deque(maxlen=_MAX_LINES) for stream in (1, 2)
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
        pipes = (1, self._process.stdout), (2, self._process.stderr)
        self._readers = [
            threading.Thread(target=self._read, args=pipe, daemon=True)
            for pipe in pipes
        ]
        waiter = threading.Thread(target=self._wait, daemon=True)
        for thread in (*self._readers, waiter):
            thread.start()

    @property
    def returncode(self) -> int:
        """How it ended, as ``Popen`` has it; only after ``finish``."""
        assert self._process.returncode is not None
        return self._process.returncode

    @property
    def is_finished(self) -> bool:
        """Whether it ended and ``finish`` was called."""
        return self._process.returncode is not None

    def send(self, number: int) -> None:
        """Send a signal to the rank, and to nothing that it started."""
        if self.ended_at is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def kill(self) -> None:
        """Kill the rank and all that it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def finish(self) -> None:
        """After its exit: kill what it left behind, and read its output to the end."""
        assert self.ended_at is not None
        # It is not reaped yet, so its number is still that of its own group.
        self.kill()
        self._process.wait()
        for thread in self._readers:
            thread.join(timeout=2)

    def last_lines(self, stream: int) -> list[str]:
        """The last lines of one of its streams, 1 or 2."""
        return [line.decode(errors="backslashreplace") for line in self._lines[stream]]

    def _read(self, stream: int, pipe: IO[bytes]) -> None:
        prefix = f"[rank {self.rank}] ".encode()
        with pipe:
            while line := pipe.readline(_MAX_LINE):
                line = line.rstrip(b"\r\n")
                self._lines[stream].append(line)
                self._show(stream, prefix + line + b"\n")

    def _wait(self) -> None:
        if hasattr(os, "waitid"):
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        else:
            self._process.wait()
        self.ended_at = time.monotonic()
        self._on_exit(self.local_rank)
