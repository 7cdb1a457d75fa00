# SPDX-License-Identifier: Apache-2.0
"""One run for one folder: who holds it, and when it is free again.

Holders are processes of their own, which tests kill, stop and cut off.
"""

import errno
import fcntl
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tessera.errors import FolderInUseError, OutputPathError
from tessera.train.loop import folder_lock as module
from tessera.train.loop.folder_lock import FolderLock

# What a child does before it takes the folder, then until it is told to end.
HOLDER = """
import errno, fcntl, os, sys, time, types
# Importing the package would take most of a second.
package = types.ModuleType("tessera")
package.__path__ = [sys.argv[2]]
sys.modules["tessera"] = package
from tessera.train.loop import folder_lock
from tessera.train.loop.folder_lock import FolderLock
{before}
lock = FolderLock()
lock.take(sys.argv[1])
print("held", flush=True)
sys.stdin.readline()
{after}
"""
# A file system that has no locks; a holder whose machine has another name.
WITHOUT_LOCKS = """
def refuse(*_):
    raise OSError(errno.ENOLCK, "No locks available")
fcntl.lockf = refuse
"""
EXECUTABLE = shlex.quote(sys.executable)
PACKAGE = str(Path(module.__file__).parents[2])
ELSEWHERE = "folder_lock._machine = lambda: 'another machine'"

Hold = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def hold() -> Iterator[Hold]:
    """Starts processes that hold a folder."""
    started: list[subprocess.Popen[str]] = []

    def start(folder: Path, *before: str, after: str = "") -> subprocess.Popen[str]:
        program = HOLDER.format(before="\n".join(before), after=after)
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", program, str(folder), PACKAGE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        assert started[-1].stdout is not None
        assert started[-1].stdout.readline() == "held\n"
        return started[-1]

    yield start
    for one in started:
        one.kill()
        one.communicate(timeout=60)


@pytest.fixture
def lock() -> Iterator[FolderLock]:
    """A lock of this process, given back at the end."""
    made = FolderLock()
    yield made
    made.release()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody takes longer than half a second to end."""
    monkeypatch.setattr(module, "_ENDING", 0.5)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def end(holder: subprocess.Popen[str], number: signal.Signals) -> None:
    holder.send_signal(number)
    holder.wait(timeout=60)


# --- held


def test_a_folder_that_is_held_names_its_holder(hold, lock, tmp_path, impatient):
    holder = hold(tmp_path)
    with pytest.raises(FolderInUseError) as caught:
        lock.take(tmp_path)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"[T710] another run writes to the folder {tmp_path}"
    assert lines[1].startswith(
        f"  got: lock: held by process {holder.pid} on host {os.uname().nodename}, "
        "since 20"
    )
    assert f" UTC: {EXECUTABLE} -c " in lines[1]
    assert lines[-2:] == [
        "  fix: wait until it has ended, or end it; or use another folder: "
        "hydra.run.dir=<folder>",
        "  docs: https://tessera-spmd.github.io/tessera/errors/T710.html",
    ]
    assert names(tmp_path) == ["lock"]


def test_one_that_is_stopped_still_holds_it(hold, lock, tmp_path, impatient):
    """By Ctrl-Z, or a debugger: it may go on at any time."""
    holder = hold(tmp_path)
    holder.send_signal(signal.SIGSTOP)
    with pytest.raises(FolderInUseError):
        lock.take(tmp_path)


def test_a_second_one_in_the_same_process_is_refused_and_costs_nothing(
    hold, lock, tmp_path
):
    lock.take(tmp_path)
    with pytest.raises(FolderInUseError, match="held by this process"):
        FolderLock().take(tmp_path)
    # To open the file of its own and to close it would have given it up.
    with pytest.raises(AssertionError):
        hold(tmp_path, "folder_lock._ENDING = 0.2")


def test_what_another_program_wrote_is_shown_without_its_escape_sequences(
    hold, lock, tmp_path, impatient
):
    hold(tmp_path, "import sys; sys.orig_argv = ['\\x1b[2J\\u202e', 'x' * 9999]")
    with pytest.raises(FolderInUseError) as caught:
        lock.take(tmp_path)
    assert r"'\x1b[2J\u202e' xxx" in str(caught.value)
    assert str(caught.value).replace("\n", "").isprintable()
    assert len(str(caught.value)) < 1500


# --- free again


def test_one_that_is_killed_holds_it_no_longer(hold, lock, tmp_path, monkeypatch):
    end(hold(tmp_path), signal.SIGKILL)
    assert names(tmp_path) == ["lock"]
    # The system says so at once: there is nothing to wait for.
    monkeypatch.setattr(module, "_PAUSE", -1.0)
    lock.take(tmp_path)
    assert f"process {os.getpid()} on host" in (tmp_path / "lock").read_text()
    lock.check()


def test_one_that_ends_leaves_nothing_behind(lock, tmp_path):
    lock.take(tmp_path / "a" / "b")
    assert names(tmp_path / "a" / "b") == ["lock"]
    lock.release()
    assert names(tmp_path) == []
    lock.check()  # holds none, and says nothing


def test_a_folder_in_which_something_was_written_stays(lock, tmp_path):
    lock.take(tmp_path / "a" / "b")
    (tmp_path / "a" / "b" / "train.log").touch()
    lock.release()
    assert names(tmp_path / "a" / "b") == ["train.log"]


def assert_waits_for_end(lock, folder, holder, *, after):
    """See that a folder is taken, and not before its holder is killed."""
    killed = threading.Event()

    def kill():
        killed.set()
        holder.kill()

    timer = threading.Timer(after, kill)
    timer.start()
    lock.take(folder)
    assert killed.is_set()
    timer.join()
    lock.check()


def test_one_that_is_just_ending_is_waited_for(hold, lock, tmp_path):
    assert_waits_for_end(lock, tmp_path, hold(tmp_path), after=0.5)


def test_what_a_holder_has_forked_does_not_hold_it(hold, lock, tmp_path):
    fork = (
        "import os\nif not os.fork():\n    time.sleep(600)\nprint('forked', flush=True)"
    )
    holder = hold(tmp_path, after=fork)
    assert holder.stdin is not None
    holder.stdin.write("\n")
    holder.stdin.flush()
    assert holder.stdout is not None
    assert holder.stdout.readline() == "forked\n"
    children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text()
    holder.kill()
    try:
        lock.take(tmp_path)
    finally:
        os.kill(int(children), signal.SIGKILL)


def test_what_was_forked_does_not_give_it_up(lock, tmp_path):
    lock.take(tmp_path)
    program = FolderLock()
    program.__dict__.update(lock.__dict__, _process=lock._process + 1)
    program.release()
    lock.check()


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", os.urandom(9999)])
def test_a_file_that_nobody_has_locked_blocks_nobody(lock, tmp_path, content):
    (tmp_path / "lock").write_bytes(content)
    lock.take(tmp_path)
    lock.check()


@pytest.mark.parametrize("target", ["file", "nothing"])
def test_a_link_is_not_followed(lock, tmp_path, target):
    (tmp_path / "file").write_text("kept")
    (tmp_path / "lock").symlink_to(tmp_path / target)
    with pytest.raises(OutputPathError, match="symbolic links"):
        lock.take(tmp_path)
    assert (tmp_path / "file").read_text() == "kept"


# --- without locks of the file system, and on other machines


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", refuse)


def test_without_locks_a_file_is_its_holders_until_it_is_removed(
    hold, lock, tmp_path, without_locks
):
    end(hold(tmp_path, WITHOUT_LOCKS), signal.SIGKILL)
    with pytest.raises(FolderInUseError) as caught:
        lock.take(tmp_path)
    assert caught.value.fix.splitlines()[-1] == (
        f"the file system has no locks: if it was killed, remove {tmp_path}/lock"
    )
    (tmp_path / "lock").unlink()
    lock.take(tmp_path)
    lock.check()
    lock.release()
    assert names(tmp_path) == []


def test_another_machine_that_is_gone_holds_it_no_longer(hold, lock, tmp_path):
    end(hold(tmp_path, ELSEWHERE), signal.SIGKILL)
    lock.take(tmp_path)
    lock.check()


def test_a_lock_that_a_server_keeps_for_a_machine_is_waited_for(
    hold, lock, tmp_path, impatient
):
    """As NFS does for a while; here the holder's own, until it is killed."""
    holder = hold(tmp_path, ELSEWHERE)
    assert_waits_for_end(lock, tmp_path, holder, after=1.5)


def test_a_holder_on_another_machine_is_waited_for_and_named(
    hold, lock, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(module, "_SERVERS_KEEP", 1.0)
    monkeypatch.setattr(module, "_SAY_AFTER", 0.0)
    hold(tmp_path, ELSEWHERE)
    with pytest.raises(FolderInUseError):
        lock.take(tmp_path)
    assert f"waiting for {tmp_path}/lock, held by process" in capsys.readouterr().err


def test_one_whose_file_was_removed_and_made_anew_learns_of_it(hold, tmp_path):
    lock = FolderLock()
    lock.take(tmp_path)
    (tmp_path / "lock").unlink()
    holder = hold(tmp_path)
    assert "another file is in its place" in refusal(lock).got
    # What it gives up then is not the lock of the other.
    lock.release()
    assert f"process {holder.pid} on" in (tmp_path / "lock").read_text()


# --- a folder that is not where it was


def refusal(lock: FolderLock) -> OutputPathError:
    with pytest.raises(OutputPathError) as caught:
        lock.check()
    return caught.value


def test_a_folder_that_is_renamed_is_noticed(lock, tmp_path):
    lock.take(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "other")
    assert str(refusal(lock)) == (
        "[T504] the folder of the run is not where it was\n"
        f"  got: {tmp_path}/run/lock: No such file or directory\n"
        "  fix: leave it in its place until the run has ended; to go on, put it back "
        "there and use training.resume=auto\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T504.html"
    )
    lock.release()
    assert names(tmp_path) == ["other"]


def test_a_folder_that_is_deleted_is_noticed(lock, tmp_path):
    lock.take(tmp_path / "run")
    (tmp_path / "run" / "lock").unlink()
    (tmp_path / "run").rmdir()
    assert refusal(lock).got == f"{tmp_path}/run/lock: No such file or directory"


def test_another_folder_in_its_place_is_noticed(lock, tmp_path):
    lock.take(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "other")
    other = FolderLock()
    other.take(tmp_path / "run")
    try:
        assert "another file is in its place" in refusal(lock).got
        lock.release()
        other.check()
    finally:
        other.release()


# --- folders that nobody can have


def test_a_folder_that_cannot_be_made_is_a_mistake(lock, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OutputPathError, match=r"file/run: Not a directory"):
        lock.take(tmp_path / "file" / "run")
    with pytest.raises(OutputPathError, match="null"):
        lock.take(tmp_path / "a\0b")


def test_a_disk_that_is_full_leaves_nothing(lock, tmp_path, monkeypatch):
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputPathError, match="No space left on device"):
        lock.take(tmp_path / "run")
    assert names(tmp_path) == []


def test_a_file_system_that_cannot_be_written_is_a_mistake(lock, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(mount, check=False).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        with pytest.raises(OutputPathError, match="Read-only file system"):
            lock.take(disk)
        with pytest.raises(OutputPathError, match="Read-only file system"):
            lock.take(disk / "run")
    finally:
        subprocess.run(["umount", str(disk)], check=True)
