# SPDX-License-Identifier: Apache-2.0
"""A run that does not get to its end when it is asked to.

python patient_run.py 2 call            # seconds of its grace period, and where it is
"""

import atexit
import ctypes
import sys
import time

from tessera.train.runtime.cluster import Cluster
from tessera.train.runtime.process_group import Processes, joined


def call(here: Processes) -> None:
    """In a call without an end, which lets threads run, as a compiler does."""
    assert here.should_continue()
    say("waiting")
    # A signal ends a sleep.
    for _ in range(600):
        ctypes.CDLL(None).sleep(600)


def hold(here: Processes) -> None:
    """It saves, in one that keeps the interpreter's lock: no thread of Python runs."""
    assert here.should_continue()
    say("waiting")
    while here.should_continue():
        time.sleep(0.01)
    for _ in range(600):
        ctypes.PyDLL(None).sleep(600)


def linger(here: Processes) -> None:
    """It stops in time, and the interpreter does not get to its own end."""
    atexit.register(time.sleep, 600)
    assert here.should_continue()
    say("waiting")
    while here.should_continue():
        time.sleep(0.01)
    say("stopped")


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    wait = {"call": call, "hold": hold, "linger": linger}[sys.argv[2]]
    with joined(Cluster(source="a test"), {}, grace=float(sys.argv[1])) as here:
        wait(here)
