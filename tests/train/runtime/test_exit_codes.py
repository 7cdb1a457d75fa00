# SPDX-License-Identifier: Apache-2.0
"""Stop signals end a command at once, and leave a program that calls one as it was."""

import signal
import subprocess
import sys

import pytest

from tessera.train.commands.launch import main as launch
from tessera.train.loop.main import main as train
from tessera.train.runtime.exit_codes import STOP_SIGNALS, exit_on_stop_signals


@pytest.mark.parametrize(("number", "code"), STOP_SIGNALS.items())
def test_a_stop_signal_ends_the_process_with_its_code(number, code):
    program = f"""
import os
from tessera.train.runtime.exit_codes import exit_on_stop_signals
with exit_on_stop_signals():
    os.kill(os.getpid(), {number:d})
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == (
        code
    )


@pytest.mark.parametrize(
    ("command", "arguments", "code"),
    [
        (train, ["--print-config"], 0),
        (train, ["no=setting"], 2),
        (launch, ["no_such_file.py"], 2),
    ],
)
def test_a_notebook_that_calls_a_command_keeps_its_handlers(command, arguments, code):
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    assert command(arguments) == code
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def test_signals_that_are_ignored_stay_ignored():
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        with exit_on_stop_signals():
            assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR2, before)
