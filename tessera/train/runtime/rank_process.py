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
from dataclasses import replace
from pathlib import Path
from typing import IO, Final

from tessera.train.runtime.launcher_protocol import Status

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
      environment: Its environment variables; that of the status pipe is added.
      rank: Its number.
      show: Takes the stream, 1 or 2, and a line, ``[rank 3] …``.
      on_exit: Called with this object, from a thread, when the process has ended.

    Attributes:
      status: What it reported last.
      ended_at: When it ended; None while it runs.
      is_late: Whether the launcher ended it for exceeding a deadline.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        rank: int,
        show: Callable[[int, bytes], None],
        on_exit: Callable[["RankProcess"], None],
    ) -> None:
        self.rank = rank
        self.status, self.is_late = Status(), False
        self.ended_at: float | None = None
        self.started_at = time.monotonic()
        self._show, self._on_exit = show, on_exit
        self._errors: deque[bytes] = deque(maxlen=_MAX_LINES)
        start = (sys.executable, "-I", "-S", str(_START), str(os.getpid()))
        status, status_writer = os.pipe()
        self._process = subprocess.Popen(
            (*start, *command),
            env={**environment, "TESSERA_STATUS": str(status_writer)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(status_writer,),
            start_new_session=True,
        )
        os.close(status_writer)
        self._readers = [
            threading.Thread(target=read, args=given, daemon=True)
            for read, *given in (
                (self._read_output, 1, self._process.stdout),
                (self._read_output, 2, self._process.stderr),
                (self._read_status, os.fdopen(status, "rb")),
            )
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

    def last_errors(self) -> list[str]:
        """The last lines of its standard error."""
        return [line.decode(errors="backslashreplace") for line in self._errors]

    def _read_output(self, stream: int, pipe: IO[bytes]) -> None:
        prefix = f"[rank {self.rank}] ".encode()
        with pipe:
            while line := pipe.readline(_MAX_LINE):
                line = line.rstrip(b"\r\n")
                if stream == 2:
                    self._errors.append(line)
                self._show(stream, prefix + line + b"\n")

    def _read_status(self, pipe: IO[bytes]) -> None:
        with pipe:
            for line in pipe:
                status, failed_at = Status.read(line), self.status.failed_at
                self.status = replace(status, failed_at=failed_at or status.failed_at)

    def _wait(self) -> None:
        if hasattr(os, "waitid"):
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        else:
            self._process.wait()
        self.ended_at = time.monotonic()
        self._on_exit(self)
