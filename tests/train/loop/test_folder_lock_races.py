# SPDX-License-Identifier: Apache-2.0
"""Of many that take the lock of a folder at the same moment, one gets it."""

import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from tessera.errors import FolderInUseError
from tessera.train.loop import folder_lock as module
from tessera.train.loop.folder_lock import FolderLock

PACKAGE = str(Path(module.__file__).parents[2])
# Takes the folder until it has counted to twelve there; a third of the holders die in
# it. What it reads is what it wrote, unless two of them are there at once.
WORKER = """
import os, random, sys, time, types
package = types.ModuleType("tessera")
package.__path__ = [sys.argv[2]]
sys.modules["tessera"] = package
from tessera.errors import FolderInUseError
from tessera.train.loop import folder_lock
from tessera.train.loop.folder_lock import FolderLock
folder_lock._PAUSE, folder_lock._ENDING = 0.001, 60.0
draw = random.Random(sys.argv[3])
counter = os.path.join(sys.argv[1], "counter")
for taken in range(12):
    if taken % 3 == 2 and not (pid := os.fork()):
        FolderLock().take(sys.argv[1])
        os._exit(0)
    if taken % 3 == 2:
        os.waitpid(pid, 0)
    lock = FolderLock()
    lock.take(sys.argv[1])
    count = int(open(counter).read()) if os.path.exists(counter) else 0
    time.sleep(draw.random() * 0.005)
    with open(counter, "w") as file:
        file.write(str(count + 1))
    lock.check()
    lock.release()
"""


@pytest.mark.parametrize("seed", range(2))
def test_of_many_that_take_it_at_once_one_has_it(tmp_path, seed):
    command = [sys.executable, "-c", WORKER, str(tmp_path), PACKAGE]
    workers = [
        subprocess.Popen([*command, f"{seed} {number}"], stderr=subprocess.PIPE)
        for number in range(5)
    ]
    ends = [(each.communicate(timeout=120)[1], each.returncode) for each in workers]
    assert ends == [(b"", 0)] * 5
    assert (tmp_path / "counter").read_text() == "60"


def test_of_threads_of_one_process_one_has_it(tmp_path):
    """A record lock is that of a process: it keeps no thread out."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(60):
            assert threads_that_take(tmp_path) == 1
    finally:
        sys.setswitchinterval(before)


def threads_that_take(folder: Path) -> int:
    held, start = list[FolderLock](), threading.Barrier(4)

    def take() -> None:
        folder_lock = FolderLock()
        start.wait()
        with suppress(FolderInUseError):
            folder_lock.take(folder)
            held.append(folder_lock)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for folder_lock in held:
        folder_lock.release()
    return len(held)


def test_a_file_that_another_removed_before_it_was_locked_is_made_again(
    tmp_path, monkeypatch
):
    made = list[Path]()

    def lock(descriptor):
        made.append(tmp_path / "lock")
        if len(made) == 1:
            made[0].unlink()
        return True

    monkeypatch.setattr(module, "lock", lock)
    folder_lock = FolderLock()
    folder_lock.take(tmp_path)
    assert len(made) == 2
    folder_lock.check()
    with pytest.raises(FolderInUseError):
        FolderLock().take(tmp_path)
    folder_lock.release()
    assert [*tmp_path.iterdir()] == []
