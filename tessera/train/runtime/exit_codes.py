# SPDX-License-Identifier: Apache-2.0
"""The exit codes of Tessera programs; docs/guides/reliability.md lists them.

A supervisor sees nothing else of a process that has ended, so each outcome that calls
for a different reaction has its own code.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
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
def handled_signals(
    numbers: Iterable[signal.Signals], handle: Callable[[int, Any], object]
) -> Iterator[None]:
    """Handle signals within a block, and as before after it.

    Ignored signals stay ignored, and outside of the main thread all stay as they are.
    """
    before = dict[signal.Signals, Any]()
    try:
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
                # None is a handler that is not Python's.
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    before[number] = signal.signal(number, handle)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_on_stop_signals() -> AbstractContextManager[None]:
    """Exit immediately on these signals, as long as there is nothing to save.

    ``StopRequests`` installs its own handlers for a time within the block.
    """
    return handled_signals(
        STOP_SIGNALS, lambda number, _: os._exit(STOP_SIGNALS[signal.Signals(number)])
    )


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
