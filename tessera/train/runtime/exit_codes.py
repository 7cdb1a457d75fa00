# SPDX-License-Identifier: Apache-2.0
"""The exit codes of Tessera programs; docs/guides/reliability.md lists them.

A supervisor sees nothing else of a process that has ended, so each outcome that calls
for a different reaction has its own code.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from signal import SIGINT, SIGTERM, SIGUSR2
from typing import Any, Final, ParamSpec

from tessera.errors import TesseraError

SUCCESS: Final = 0
FAILURE: Final = 1
"""An uncaught exception."""
USER_ERROR: Final = 2
"""A coded error: running the same command again fails in the same way."""
WRONG_VALUES: Final = 74
"""A device computes wrong values: a step cannot be repeated (``EX_IOERR``)."""
REQUEUE: Final = 75
"""Stopped by request: the same command resumes the run (``EX_TEMPFAIL``)."""
RANKS_DISAGREE: Final = 76
"""The ranks did not find each other, or belong to different runs (``EX_PROTOCOL``)."""
STALLED: Final = 124
"""The watchdog: a phase exceeded its deadline (the code of ``timeout``)."""
INTERRUPTED: Final = 128 + SIGINT
"""Stopped by a person with Ctrl-C."""
TERMINATED: Final = 128 + SIGTERM
"""Terminated because another process of the group failed."""

STOP_SIGNALS: Final = {SIGTERM: REQUEUE, SIGUSR2: REQUEUE, SIGINT: INTERRUPTED}
"""The signals that request a stop, with the resulting exit code. Slurm sends SIGUSR2
to jobs that were submitted with submitit."""


@contextmanager
def exit_on_stop_signals() -> Iterator[None]:
    """Exit immediately on these signals, as long as there is nothing to save.

    Ignored signals stay ignored, and outside of the main thread all stay as they are.
    ``StopRequests`` installs its own handlers for a time within the block.
    """
    before = dict[signal.Signals, Any]()
    if threading.current_thread() is threading.main_thread():
        # None is a handler that is not Python's.
        kept = (signal.SIG_IGN, None)
        handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        before = {number: it for number, it in handlers.items() if it not in kept}
    for number in before:
        code = STOP_SIGNALS[number]
        signal.signal(number, lambda *_, code=code: os._exit(code))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def shell_exit_code(returncode: int) -> int:
    """The exit code a shell reports for ``Popen.returncode``: 137 after SIGKILL."""
    return 128 - returncode if returncode < 0 else returncode


_Arguments = ParamSpec("_Arguments")


def shows_errors(main: Callable[_Arguments, int]) -> Callable[_Arguments, int]:
    """A program that shows a ``TesseraError`` and returns its exit code."""

    @wraps(main)
    def run(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> int:
        try:
            return main(*args, **kwargs)
        except TesseraError as error:
            sys.stderr.write(f"{error}\n")
            return error.exit_code

    return run
