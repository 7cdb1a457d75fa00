# SPDX-License-Identifier: Apache-2.0
"""Processes that end at once, or by their deadline, whatever they are doing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Importing the package itself would take most of a second, for each process.
BEGIN = f"""
import os, sys, time, types
package = types.ModuleType("tessera")
package.__path__ = [{str(Path(__file__).parents[3] / "tessera")!r}]
sys.modules["tessera"] = package
from tessera.train.runtime.process_exit import *
"""
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps it")


def run(program: str, **options) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", BEGIN + program],
        **({"capture_output": True} | options),
        text=True,
        timeout=120,
        check=False,
    )


def test_what_was_written_and_the_last_words_are_read():
    ended = run("sys.stdout.write('half a line')\nexit_now(75, 'asked to end\\n')")
    assert ended.returncode == 75
    assert ended.stdout == "half a line"
    assert ended.stderr == "asked to end\n"


def test_what_is_held_is_given_back_whoever_ends_the_process():
    held = "with on_exit(lambda: os.write(1, b'given back\\n')):"
    assert run(f"{held}\n    exit_now(3)").stdout == "given back\n"
    assert run(f"{held}\n    1 / 0").stdout == "given back\n"
    assert run(f"{held}\n    pass\nexit_now(0)").stdout == "given back\n"


@pytest.mark.full
def test_a_reader_that_does_not_read_keeps_nobody_alive():
    """A pipe is full after 64 KiB, and a write to it waits."""
    read, write = os.pipe()
    try:
        ended = run("exit_now(75, 'x' * 1000000)", capture_output=False, stderr=write)
    finally:
        os.close(read)
        os.close(write)
    assert ended.returncode == 75


@LINUX
@pytest.mark.parametrize(
    "program",
    [
        "import ctypes\nctypes.PyDLL(None).sleep(600)",
        "import atexit\natexit.register(time.sleep, 600)",
        "import threading\nthreading.Thread(target=time.sleep, args=(600,)).start()",
    ],
    ids=["a call that keeps the interpreter's lock", "atexit", "a thread"],
)
def test_a_deadline_ends_the_process_whatever_it_does(program):
    assert run(f"Deadline().set(0.5, 75)\n{program}").returncode == 75


@LINUX
def test_a_deadline_can_be_moved_and_taken_back():
    moved = "d = Deadline()\nd.set(600, 1)\nd.set(0.1, 75)\ntime.sleep(600)"
    assert run(moved).returncode == 75
    taken_back = "d = Deadline()\nd.set(0.2, 75)\nd.clear()\nd.clear()\ntime.sleep(0.5)"
    assert run(taken_back).returncode == 0


@LINUX
def test_what_is_forked_or_started_has_no_deadline():
    program = (
        "import subprocess\n"
        "Deadline().set(0.3, 75)\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    time.sleep(1)\n"
        "    os.write(1, b'lives on')\n"
        "    os._exit(0)\n"
        "time.sleep(600)\n"
    )
    ended = run(program)
    assert ended.returncode == 75
    assert ended.stdout == "lives on"
