# SPDX-License-Identifier: Apache-2.0
"""The watchdog, in processes of its own: it ends them."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tessera.runtime.launcher_protocol import Command, StatusPage
from tessera.runtime.watchdog import Watchdog

PROGRAM = """
import sys, time
from pathlib import Path
from tessera.runtime.launcher_protocol import StatusPage
from tessera.runtime.watchdog import Watchdog
page = StatusPage(Path(sys.argv[2])) if len(sys.argv) > 2 else None
dog = Watchdog({"step": float(sys.argv[1]), "compile": None}, rank=3, page=page)
dog.connect(lambda said: None, lambda: {"2": "step 7, for 1.2 s"})
dog.start()
dog.enter("compile")
time.sleep(2.5)
dog.enter("step", 7)
print("in step 7", flush=True)
time.sleep(600)
"""
LIMIT = 240.0


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, *arguments]
    started = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert started.stdout is not None
    assert started.stdout.readline() == "in step 7\n"
    return started


def test_a_phase_that_takes_too_long_ends_the_process_and_tells_where_all_are():
    started = start("2")
    try:
        _, said = started.communicate(timeout=LIMIT)
    finally:
        started.kill()
    assert started.returncode == 124
    stacks, _, error = said.partition("[T708] ")
    assert stacks.startswith("stacks of rank 3, in phase 'step 7':\n")
    assert 'File "<string>", line ' in stacks
    assert error.startswith(
        "rank 3 does not get on: phase 'step 7' takes longer than "
        "runtime.step_deadline\n  got: 2."
    )
    assert "  got: rank 2: step 7, for 1.2 s\n  got: rank 3: step 7, for 2." in error


def test_time_that_the_process_was_stopped_for_is_no_phases():
    """As by Ctrl-Z, or a lid that is closed."""
    # With the stop counted, the phase would have lasted as long as that and more.
    started = start("3")
    try:
        os.kill(started.pid, signal.SIGSTOP)
        time.sleep(6)
        os.kill(started.pid, signal.SIGCONT)
        _, said = started.communicate(timeout=LIMIT)
    finally:
        started.kill()
    (seconds,) = re.findall(r"got: (\d+\.\d) s, of 3 s", said)
    assert float(seconds) < 6


@pytest.mark.parametrize("command", [Command.END, Command.SHOW_STACKS_AND_END])
def test_the_launchers_word_ends_a_rank(tmp_path, command):
    page = StatusPage.create(tmp_path / "status", 1)
    started = start("600", str(tmp_path / "status"))
    try:
        assert page.status(0).phase == "step 7"
        page.command = command
        _, said = started.communicate(timeout=LIMIT)
    finally:
        started.kill()
    assert started.returncode == 143
    assert ("stacks of rank 3" in said) == (command == Command.SHOW_STACKS_AND_END)


def test_a_phase_without_a_deadline_may_take_any_time(tmp_path):
    page = StatusPage.create(tmp_path / "status", 1)
    dog = Watchdog({"step": 9.0, "compile": None}, page=page)
    dog.enter("compile")
    assert page.status(0).deadline == float("inf")
    dog.enter("step", 1)
    assert page.status(0).deadline == 9.0
    dog.enter("rendezvous")
    assert page.status(0).deadline == float("inf")
