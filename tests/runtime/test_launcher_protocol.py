# SPDX-License-Identifier: Apache-2.0
"""What the launcher and its ranks tell each other."""

import os
import signal
import stat
import subprocess
import sys
from math import inf
from pathlib import Path

import pytest

from tessera.runtime.launcher_protocol import (
    LOCK_FILE,
    Command,
    ParentLauncher,
    StatusPage,
)

# Holds the lock of a launcher's folder.
HOLDER = """
import fcntl, sys, time
file = open(sys.argv[1], "wb")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(600)
"""
PROGRAM = """
import os
from tessera.runtime.cluster import Cluster
from tessera.runtime.process_group import joined
with joined(Cluster(source="a test"), {}):
    print("trains", flush=True)
    import time
    time.sleep(600)
"""


def variables(folder: Path, launcher: int) -> dict[str, str]:
    return {
        "TESSERA_LAUNCHER": str(launcher),
        "TESSERA_LOCAL_RANK": "1",
        "TESSERA_ATTEMPT": "2",
        "TESSERA_STATUS": str(folder / "status"),
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
    assert found == ParentLauncher(tmp_path, os.getppid(), 1, 2, is_rank=True)
    assert found.is_alive


def test_what_a_rank_starts_is_none_and_knows_whether_the_launcher_lives(
    tmp_path, holder
):
    found = ParentLauncher.find(variables(tmp_path, holder.pid))
    assert found is not None
    assert not found.is_rank
    assert found.is_alive
    holder.send_signal(signal.SIGKILL)
    holder.wait(timeout=60)
    assert not found.is_alive


def test_a_launcher_that_ended_in_order_is_gone(tmp_path):
    found = ParentLauncher.find(variables(tmp_path / "removed", os.getpid()))
    assert found is not None
    assert not found.is_alive


def start(folder: Path, launcher: int) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, **variables(folder, launcher)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_process_that_was_launched_and_has_no_launcher_does_not_begin(tmp_path):
    """As on a system that does not kill it with its launcher."""
    started = start(tmp_path, os.getpid() + 1)
    said, errors = started.communicate(timeout=120)
    assert (started.returncode, said) == (143, "")
    assert errors == "the launcher is gone, and this rank ends with it\n"


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
    assert errors == "the launcher is gone, and this rank ends with it\n"


# --- the status page


def test_what_a_rank_says_the_launcher_reads(tmp_path):
    page = StatusPage.create(tmp_path / "status", 2)
    rank = StatusPage(tmp_path / "status")
    assert page.status(1).phase == ""
    rank.enter(1, "step 12", 100.0, 900.0)
    said = page.status(1)
    assert (said.phase, said.since, said.deadline) == ("step 12", 100.0, 900.0)
    assert said.failed_at == 0
    assert page.status(0).deadline == inf
    rank.enter(1, "x" * 500, 101.0, inf)
    assert set(page.status(1).phase) == {"x"}
    assert page.status(0).phase == ""


def test_the_first_failure_stays_through_later_phases(tmp_path):
    page = StatusPage.create(tmp_path / "status", 1)
    page.fail(0, 5.0)
    page.enter(0, "end", 6.0, inf)
    page.fail(0, 7.0)
    assert page.status(0).failed_at == 5.0


def test_the_launchers_word_reaches_every_rank(tmp_path):
    page = StatusPage.create(tmp_path / "status", 2)
    rank = StatusPage(tmp_path / "status")
    assert rank.command == Command.CONTINUE
    page.command = Command.SHOW_STACKS_AND_END
    assert rank.command == Command.SHOW_STACKS_AND_END
    assert rank.num_ranks == 2


def test_a_page_is_the_users_own_and_blank_again_for_the_next_attempt(tmp_path):
    path = tmp_path / "status"
    page = StatusPage.create(path, 1)
    page.command = Command.END
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert StatusPage.create(path, 1).command == Command.CONTINUE


def test_another_file_is_no_status_page(tmp_path):
    path = tmp_path / "status"
    path.write_bytes(bytes(256))
    with pytest.raises(ValueError, match="not a status page"):
        StatusPage(path)
