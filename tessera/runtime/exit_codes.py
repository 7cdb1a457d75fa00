# SPDX-License-Identifier: Apache-2.0
"""What a program of Tessera exits with; docs/reliability.md has them in a table.

A supervisor reads nothing else of a process that ended, so each reason to do something
else about it has a number of its own.
"""

import os
import signal
from signal import SIGINT, SIGTERM, SIGUSR2
from typing import Final

SUCCESS: Final = 0
FAILURE: Final = 1
"""An exception that nothing caught."""
MISTAKE: Final = 2
"""A coded error: another try with the same command ends alike."""
REQUEUE: Final = 75
"""Asked to end, and did: the same command goes on from there (``EX_TEMPFAIL``)."""
DISAGREEMENT: Final = 76
"""The ranks did not find each other, or are not of one run (``EX_PROTOCOL``)."""
STALLED: Final = 124
"""The watchdog: a phase took longer than its deadline (that of ``timeout``)."""
INTERRUPTED: Final = 128 + SIGINT
"""Ended by a person, by Ctrl-C."""
ENDED: Final = 128 + SIGTERM
"""Ended with its group, for no fault of its own."""

ASKS: Final = {SIGTERM: REQUEUE, SIGUSR2: REQUEUE, SIGINT: INTERRUPTED}
"""The signals that ask a run to end, with the code that it then exits with. Slurm sends
SIGUSR2 where submitit started the run."""


def end_when_asked() -> None:
    """Let these signals end the process at once, while there is nothing to save yet.

    Those that are ignored stay so. Whoever can do better takes them over later.
    """
    for number, code in ASKS.items():
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_, code=code: os._exit(code))


def exit_code_of(returncode: int) -> int:
    """The exit code for ``Popen.returncode``, as a shell has it: 137 for a SIGKILL."""
    return 128 - returncode if returncode < 0 else returncode
