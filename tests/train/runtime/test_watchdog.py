# SPDX-License-Identifier: Apache-2.0
"""The watchdog, in processes of its own: it ends them."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tessera.train.runtime.launcher_protocol import ParentLauncher, Status, end_attempt
from tessera.train.runtime.watchdog import Watchdog

PROGRAM = """
import os, sys, time
from tessera.train.runtime.launcher_protocol import ParentLauncher
from tessera.train.runtime.watchdog import Watchdog
launcher = ParentLauncher.find(os.environ)
dog = Watchdog({"step": float(sys.argv[1]), "compile": None}, rank=3, launcher=launcher)
dog.connect(lambda said: None, lambda: {"2": "step 7, for 1.2 s"})
dog.start()
dog.enter("compile")
time.sleep(2.5)
dog.enter("step", 7)
print("in step 7", flush=True)
time.sleep(600)
"""
LIMIT = 240.0


def start(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    started = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
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


@pytest.mark.full
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


@pytest.mark.full
def test_the_launcher_ends_a_rank(tmp_path):
    launcher = {
        "TESSERA_LAUNCHER": str(os.getpid()),
        "TESSERA_ATTEMPT": "0",
        "TESSERA_STATUS": "0",  # standard input is no pipe
        "TESSERA_FOLDER": str(tmp_path),
    }
    started = start("600", **launcher)
    try:
        end_attempt(tmp_path, 0)
        _, said = started.communicate(timeout=LIMIT)
    finally:
        started.kill()
    assert started.returncode == 143
    assert said == "the launcher ends this rank\n"


def test_the_launcher_learns_each_phase_with_its_deadline_and_the_first_failure(
    monkeypatch, tmp_path
):
    reported: list[Status] = []
    monkeypatch.setattr(ParentLauncher, "report", lambda _, one: reported.append(one))
    launcher = ParentLauncher(tmp_path, os.getppid(), 0, 9, is_rank=True)
    dog = Watchdog({"step": 9.0, "compile": None}, launcher=launcher)
    dog.enter("compile")
    dog.enter("step", 1)
    dog.enter("rendezvous")
    dog.fail()
    dog.enter("end")
    dog.fail()
    infinite = float("inf")
    assert [(one.phase, one.deadline) for one in reported] == [
        ("compile", infinite),
        ("step 1", 9.0),
        *[("rendezvous", infinite)] * 2,
        *[("end", infinite)] * 2,
    ]
    assert [one.failed_at for one in reported[:3]] == [0.0] * 3
    assert len({one.failed_at for one in reported[3:]}) == 1
    assert reported[-1].failed_at > 0
