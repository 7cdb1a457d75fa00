# SPDX-License-Identifier: Apache-2.0
"""What the launcher and its ranks tell each other."""

import os
import signal
import subprocess
import sys
from math import inf
from pathlib import Path

import pytest

from tessera.train.runtime.launcher_protocol import (
    LOCK_FILE,
    ParentLauncher,
    Status,
    end_attempt,
)

# Holds the lock of a launcher's folder.
HOLDER = """
import fcntl, sys, time
file = open(sys.argv[1], "wb")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(600)
"""
GONE = "the launcher is gone, and this rank ends with it"
PROGRAM = """
import os
from tessera.train.runtime.cluster import Cluster
from tessera.train.runtime.process_group import joined
with joined(Cluster(source="a test"), {}):
    print("trains", flush=True)
    import time
    time.sleep(600)
"""


def variables(folder: Path, launcher: int) -> dict[str, str]:
    return {
        "TESSERA_LAUNCHER": str(launcher),
        "TESSERA_ATTEMPT": "2",
        "TESSERA_STATUS": "9",
        "TESSERA_FOLDER": str(folder),
    }


@pytest.fixture
def holder(tmp_path):
    """A process that stands for the launcher of ``tmp_path``."""
    started = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / LOCK_FILE)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert started.stdout is not None
    assert started.stdout.readline() == "held\n"
    yield started
    started.kill()
    started.communicate(timeout=60)


def test_a_process_without_the_variables_was_not_launched(tmp_path):
    given = variables(tmp_path, os.getppid())
    for name in given:
        rest = {key: value for key, value in given.items() if key != name}
        assert ParentLauncher.find(rest) is None
    assert ParentLauncher.find(given | {"TESSERA_LAUNCHER": "-1"}) is None


def test_the_launcher_s_own_process_is_a_rank(tmp_path):
    found = ParentLauncher.find(variables(tmp_path, os.getppid()))
    assert found == ParentLauncher(tmp_path, os.getppid(), 2, 9, is_rank=True)
    assert found.reason_to_end() is None


def test_what_a_rank_starts_is_none_and_knows_whether_the_launcher_lives(
    tmp_path, holder
):
    found = ParentLauncher.find(variables(tmp_path, holder.pid))
    assert found is not None
    assert not found.is_rank
    assert found.reason_to_end() is None
    holder.send_signal(signal.SIGKILL)
    holder.wait(timeout=60)
    assert found.reason_to_end() == GONE


def test_a_launcher_that_ended_in_order_is_gone(tmp_path):
    found = ParentLauncher.find(variables(tmp_path / "removed", os.getpid()))
    assert found is not None
    assert found.reason_to_end() == GONE


def start(folder: Path, launcher: int) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, **variables(folder, launcher)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow(reason="it starts a process")
def test_a_process_that_was_launched_and_has_no_launcher_does_not_begin(tmp_path):
    """As on a system that does not kill it with its launcher."""
    started = start(tmp_path, os.getpid() + 1)
    said, errors = started.communicate(timeout=120)
    assert (started.returncode, said) == (143, "")
    assert errors == f"{GONE}\n"


def test_a_program_between_launcher_and_rank_keeps_neither_alive(tmp_path, holder):
    """A launched script that starts the program: nobody's death ends that by itself."""
    started = start(tmp_path, holder.pid)
    assert started.stdout is not None
    try:
        assert started.stdout.readline() == "trains\n"
        holder.send_signal(signal.SIGKILL)
        holder.wait(timeout=60)
        _, errors = started.communicate(timeout=120)
    finally:
        started.kill()
    assert started.returncode == 143
    assert errors == f"{GONE}\n"


def test_the_launcher_ends_the_ranks_of_one_attempt_and_not_of_the_next(tmp_path):
    given = variables(tmp_path, os.getppid())
    second = ParentLauncher.find(given)
    third = ParentLauncher.find(given | {"TESSERA_ATTEMPT": "3"})
    assert second is not None
    assert third is not None
    end_attempt(tmp_path, 2)
    assert second.reason_to_end() == "the launcher ends this rank"
    assert third.reason_to_end() is None


def test_what_rank_0_shares_is_that_of_the_first_attempt(tmp_path):
    given = variables(tmp_path, os.getppid())
    first, second = (
        ParentLauncher.find(given | {"TESSERA_ATTEMPT": number}) for number in "01"
    )
    assert first is not None
    assert second is not None
    assert first.shared_of_first_attempt("the folder") == "the folder"
    assert second.shared_of_first_attempt("another") == "the folder"


# --- the status of a rank


@pytest.mark.parametrize(
    "status",
    [
        Status(),
        Status("step 12", 100.25, 900.0),
        Status("save", 1 / 3, inf, failed_at=5.0),
    ],
)
def test_a_status_is_one_line(status):
    assert Status.read(status.as_line()) == status


def test_a_pipe_takes_the_line_of_any_phase_as_a_whole():
    line = Status("\ud800é" * 10_000).as_line()
    assert len(line) < 512  # as POSIX has it
    assert line.count(b"\n") == 1


def test_a_rank_writes_its_status_to_the_pipe_of_the_launcher(tmp_path):
    read, write = os.pipe()
    given = variables(tmp_path, os.getppid()) | {"TESSERA_STATUS": str(write)}
    rank = ParentLauncher.find(given)
    assert rank is not None
    rank.report(Status("step 1", 3.0))
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        assert Status.read(pipe.read()) == Status("step 1", 3.0)
    rank.report(Status("step 2"))  # somebody closed it


def test_a_file_in_the_place_of_the_pipe_is_not_written(tmp_path):
    """A program between launcher and rank may have closed it, and opened a file."""
    with (tmp_path / "file").open("wb") as file:
        status = {"TESSERA_STATUS": str(file.fileno())}
        rank = ParentLauncher.find(variables(tmp_path, os.getppid()) | status)
        assert rank is not None
        rank.report(Status("step 1"))
    assert not (tmp_path / "file").read_bytes()
