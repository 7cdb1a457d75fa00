# SPDX-License-Identifier: Apache-2.0
"""A process is as old as the system says, its imports included."""

import os
import subprocess
import sys
import time

from tessera.train.runtime.process_age import process_age

ALIVE = 240.0


def test_the_age_of_a_process_counts_from_its_first_instruction():
    program = (
        "import os, time; begun = time.monotonic()\n"
        "from tessera.train.runtime.process_age import process_age\n"
        "time.sleep(0.2); print(process_age(os.getpid()) - (time.monotonic() - begun))"
    )
    begun = time.monotonic()
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    # Before its first line, Python itself has started.
    assert 0 < float(output.stdout) < time.monotonic() - begun


def test_a_process_knows_its_age():
    before = time.monotonic()
    program = [sys.executable, "-c", "input()"]
    with subprocess.Popen(program, stdin=subprocess.PIPE) as child:
        time.sleep(0.1)
        age = process_age(child.pid)
        assert 0.05 < age < time.monotonic() - before + 0.05
        child.communicate(b"\n", timeout=ALIVE)


def test_where_the_system_does_not_say_the_age_counts_from_the_import():
    assert 0 < process_age(-1) < process_age(os.getpid())
