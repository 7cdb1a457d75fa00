# SPDX-License-Identifier: Apache-2.0
"""One run for one folder: who holds it, and when it is free again.

Holders are processes of their own, which tests kill, stop and cut off.
"""

import errno
import fcntl
import json
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
BEATING = "folder_lock._BEAT = 0.05"
SILENT = "folder_lock._BEAT = 600.0"

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
    """Half a second without a sign of life is silence."""
    monkeypatch.setattr(module, "_SILENCE", 0.5)
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
    said = json.loads((tmp_path / "lock.1").read_text())
    assert said["process"] == holder.pid
    assert said["host"] == os.uname().nodename
    assert said["command"].startswith(f"{EXECUTABLE} -c ")
    lines = str(caught.value).splitlines()
    assert lines[0] == f"[T710] another run writes to the folder {tmp_path}"
    assert lines[1].startswith(
        f"  got: lock.1: held by process {holder.pid} on host {said['host']}, since "
        f"{said['since']}: {EXECUTABLE} -c "
    )
    assert lines[-2:] == [
        "  fix: wait until it has ended, or end it; or use another folder: "
        "hydra.run.dir=<folder>",
        "  docs: https://tessera-spmd.github.io/tessera/errors/T710.html",
    ]
    assert names(tmp_path) == ["lock.1"]


def test_one_that_is_stopped_still_holds_it(hold, lock, tmp_path, impatient):
    """By Ctrl-Z, or a debugger: it gives no sign of life, and may go on at any time."""
    holder = hold(tmp_path, SILENT)
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
    assert len(str(caught.value)) < 1000


# --- free again


def test_one_that_is_killed_holds_it_no_longer(hold, lock, tmp_path, monkeypatch):
    end(hold(tmp_path), signal.SIGKILL)
    assert names(tmp_path) == ["lock.1"]
    # The system says so at once: there is nothing to wait for.
    monkeypatch.setattr(module, "_PAUSE", -1.0)
    lock.take(tmp_path)
    assert names(tmp_path) == ["lock.2"]
    lock.check()


def test_one_that_ends_leaves_nothing_behind(lock, tmp_path):
    lock.take(tmp_path / "a" / "b")
    assert names(tmp_path / "a" / "b") == ["lock.1"]
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


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[" * 4000,
        b'{"machine": 1}',
        b"\xff\xfe",
        b'{"process": 1e999}',
        os.urandom(9999),
    ],
)
def test_a_file_that_says_nothing_blocks_nobody_for_long(
    lock, tmp_path, impatient, content
):
    (tmp_path / "lock.7").write_bytes(content)
    lock.take(tmp_path)
    assert names(tmp_path) == ["lock.8"]


def test_links_and_other_names_are_no_holders(lock, tmp_path, impatient):
    (tmp_path / "lock.3").symlink_to("nowhere")
    for name in ("lock.0", "lock.x", "lock.1.old", "lock"):
        (tmp_path / name).touch()
    lock.take(tmp_path)
    assert "lock.4" in names(tmp_path)
    assert not (tmp_path / "nowhere").exists()


# --- without locks of the file system, and on other machines


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", refuse)


def test_without_locks_one_that_gives_signs_of_life_holds_it(
    hold, lock, tmp_path, without_locks
):
    hold(tmp_path, WITHOUT_LOCKS, BEATING)
    with pytest.raises(FolderInUseError):
        lock.take(tmp_path)


def test_without_locks_one_that_is_silent_loses_it_and_learns_of_it(
    hold, lock, tmp_path, without_locks, impatient
):
    told = (
        "from tessera.errors import FolderInUseError\n"
        "try:\n    lock.check()\nexcept FolderInUseError as error:\n"
        "    print(str(error).splitlines()[1], flush=True)\n"
        "lock.release()\n"
    )
    holder = hold(tmp_path, WITHOUT_LOCKS, SILENT, after=told)
    lock.take(tmp_path)
    said, _ = holder.communicate("\n", timeout=60)
    assert f"  got: lock.2: held by process {os.getpid()} on host" in said
    # What it gives up then is not the lock of the other.
    assert names(tmp_path) == ["lock.2"]
    lock.check()


def test_locks_that_another_machine_does_not_see_prove_no_end(hold, lock, tmp_path):
    """Some mounts keep locks to themselves: free here is not free there."""
    hold(tmp_path, ELSEWHERE, WITHOUT_LOCKS, BEATING)
    with pytest.raises(FolderInUseError):
        lock.take(tmp_path)


def test_another_machine_that_is_silent_loses_it(hold, lock, tmp_path, impatient):
    end(hold(tmp_path, ELSEWHERE), signal.SIGKILL)
    lock.take(tmp_path)
    assert names(tmp_path) == ["lock.2"]


def test_a_lock_that_a_server_keeps_for_a_machine_is_waited_for(
    hold, lock, tmp_path, impatient
):
    """As NFS does for a while; here the holder's own, until it is killed."""
    holder = hold(tmp_path, ELSEWHERE, SILENT)
    assert_waits_for_end(lock, tmp_path, holder, after=1.5)


def test_one_that_a_server_keeps_for_ever_is_said(
    hold, lock, tmp_path, impatient, monkeypatch, capsys
):
    monkeypatch.setattr(module, "_SERVERS_KEEP", 1.0)
    monkeypatch.setattr(module, "_SAY_AFTER", 0.0)
    hold(tmp_path, ELSEWHERE, SILENT)
    with pytest.raises(FolderInUseError):
        lock.take(tmp_path)
    assert (
        f"waiting for {tmp_path}, which was held by process" in capsys.readouterr().err
    )


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
        f"  got: {tmp_path}/run/lock.1: No such file or directory\n"
        "  fix: leave it in its place until the run has ended; to go on, put it back "
        "there and use training.resume=auto\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T504.html"
    )
    lock.release()
    assert names(tmp_path) == ["other"]


def test_a_folder_that_is_deleted_is_noticed(lock, tmp_path):
    lock.take(tmp_path / "run")
    (tmp_path / "run" / "lock.1").unlink()
    (tmp_path / "run").rmdir()
    assert refusal(lock).got == f"{tmp_path}/run/lock.1: No such file or directory"


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


# --- many at once


def test_one_that_looked_too_early_does_not_begin_to_count_anew(
    hold, lock, tmp_path, monkeypatch, impatient
):
    """It saw an empty folder; meanwhile others came, and the first of them went."""
    look, seen = module._entries, list[Path]()

    def look_too_early(folder: Path) -> Iterator[Any]:
        seen.append(folder)
        return look(folder) if len(seen) > 1 else iter(())

    hold(tmp_path)
    (tmp_path / "lock.1").rename(tmp_path / "lock.2")
    monkeypatch.setattr(module, "_entries", look_too_early)
    with pytest.raises(FolderInUseError):
        lock.take(tmp_path)
    assert names(tmp_path) == ["lock.2"]
