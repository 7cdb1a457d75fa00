# SPDX-License-Identifier: Apache-2.0
"""A rank ends with its launcher, from its first instruction on; real processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tessera.train.runtime import start_rank

START = start_rank.__file__
LAUNCHER = f"""
import os, subprocess, sys, time
start = [sys.executable, "-I", "-S", {START!r}, str(os.getpid())]
child = subprocess.Popen([*start, sys.executable, "-c", sys.argv[1]])
time.sleep(600)
"""
# What keeps the interpreter's lock lets no thread of Python look for the launcher.
STUCK = """
import ctypes, os
print(os.getpid(), flush=True)
ctypes.PyDLL(None).sleep(600)
"""


def wait_until(happened: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not happened() and time.monotonic() < deadline:
        time.sleep(0.05)
    return happened()


def is_gone(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can")
def test_a_rank_that_does_nothing_else_is_killed_with_its_launcher():
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, STUCK], stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    rank = int(launcher.stdout.readline())
    assert not is_gone(rank)
    launcher.kill()
    launcher.communicate(timeout=60)
    try:
        assert wait_until(lambda: is_gone(rank))
    finally:
        if not is_gone(rank):
            os.kill(rank, signal.SIGKILL)


def test_one_whose_launcher_died_before_that_runs_no_program():
    """This process is not the launcher that it was told."""
    command = [sys.executable, "-c", "print('trains on for ever')"]
    ended = subprocess.run(
        [sys.executable, "-I", "-S", START, str(os.getpid() + 1), *command],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (143, "", "")


def test_a_program_gets_its_arguments_and_its_process_stays_the_same():
    program = "import os, sys; print(os.getpid(), *sys.argv[1:])"
    started = subprocess.Popen(
        [
            *(sys.executable, "-I", "-S", START, str(os.getpid())),
            *(sys.executable, "-c", program, "a b", "--c=d"),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    said, _ = started.communicate(timeout=60)
    assert said == f"{started.pid} a b --c=d\n"
