# SPDX-License-Identifier: Apache-2.0
"""Calls functions in a process of its own, whose memory and CPU time are limited.

What reads a file or runs a template that somebody else wrote may take all memory, or
never end. Then the kernel ends that process, and this one has an error to show.

Not multiprocessing, which would run an unguarded main module again. Requests are
pickled and answers are JSON: a process that a hostile file controls gains nothing here.
"""

import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, BinaryIO, Final, NoReturn

from tessera import errors
from tessera.errors import TesseraError
from tessera.train.runtime.python_process import module_command

READER_BYTES: Final = 16 * 2**30
"""For a process that reads data: twice what the tokens of a text of 64 MiB take."""


class WorkerDiedError(Exception):
    """The process has ended before it answered; has its exit code."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"exit code {exit_code}")
        self.exit_code = exit_code


class WorkerProcess:
    """A process that calls functions one after another.

    It ends with this object, and when this process does, even by SIGKILL.

    Args:
      memory_bytes: The most address space that it may have.
      cpu_seconds: The most CPU time of one call; 0 is no limit. A process that takes
        more dies of SIGPROF.
    """

    def __init__(self, memory_bytes: int, cpu_seconds: float = 0) -> None:
        self._lock = threading.Lock()
        self.process = subprocess.Popen(
            module_command(__name__, str(memory_bytes), str(cpu_seconds)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Processes are parallel; the library tokenizers need not be.
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,  # Ctrl-C is for this process
        )
        weakref.finalize(self, _end, self.process)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What a function of a module returns, which JSON has to hold.

        Raises:
          WorkerDiedError: The process has ended.
          MemoryError: The call takes more than ``memory_bytes``.
          TesseraError: What the function raises.
        """
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        content = pickle.dumps((function, arguments))
        answer = b""
        with self._lock, suppress(BrokenPipeError):
            stdin.write(content)
            stdin.flush()
            answer = stdout.readline()
        if not answer.endswith(b"\n"):
            raise WorkerDiedError(self.process.wait())
        kind, value = json.loads(answer.decode("utf-8", "surrogatepass"))
        if kind == "value":
            return value
        if kind == "MemoryError":
            raise MemoryError
        what, got, fix = value
        raise getattr(errors, kind)(what, got=got, fix=fix)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.communicate()


def main() -> NoReturn:
    """Answer the calls of the process that has started this one, until it ends."""
    memory_bytes, cpu_seconds = int(sys.argv[1]), float(sys.argv[2])
    calls, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # nor do its own processes read calls
    os.dup2(2, 1)  # what a library prints is no answer
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    requests = SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...]]]()
    threading.Thread(target=_receive, args=(calls, requests), daemon=True).start()
    while True:
        function, arguments = requests.get()
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        line = _answer(function, arguments)
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(line + b"\n")
        answers.flush()


def _receive(calls: BinaryIO, requests: "SimpleQueue[Any]") -> None:
    """Read requests beside the calls, to end at once when nobody waits for them."""
    try:
        while True:
            requests.put(pickle.load(calls))
    finally:
        os._exit(1)


def _answer(function: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    """What a call returns or raises, as one line."""
    kind: str
    value: Any
    try:
        kind, value = "value", function(*arguments)
    except TesseraError as error:
        kind, value = type(error).__name__, (error.what, error.got, error.fix)
    except MemoryError:
        kind, value = "MemoryError", None
    return json.dumps([kind, value], ensure_ascii=False).encode(errors="surrogatepass")
