# SPDX-License-Identifier: Apache-2.0
"""Of many that take the lock of a folder at the same moment, one gets it."""

import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tessera.errors import FolderInUseError
from tessera.train.loop import folder_lock as module
from tessera.train.loop.folder_lock import FolderLock


class Pausing:
    """The module ``os``, with a pause before whatever others may see."""

    def __init__(self, draw: random.Random) -> None:
        self._pauses = [draw.random() ** 4 * 0.01 for _ in range(997)]
        self._counter = iter(range(10**9))

    def pause(self) -> None:
        time.sleep(self._pauses[next(self._counter) % len(self._pauses)])

    def __getattr__(self, name: str) -> Any:
        if name in ("open", "scandir"):
            self.pause()
        return getattr(os, name)


class Crowd:
    """Threads that take one folder, of which a third are gone without giving it back.

    Whether one is gone, they know from here.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, seed
        self.system = Pausing(random.Random(seed))
        self.gone, self.holding = set[Any](), set[int]()
        self.most, self._guard = 0, threading.Lock()

    def wait_for_end(self, folder: Path, entry: Any) -> None:
        self.system.pause()
        if entry not in self.gone and entry.path(folder).exists():
            raise FolderInUseError("held")

    def work(self, number: int) -> None:
        draw, taken = random.Random(1000 * self.seed + number), 0
        while taken < 12:
            lock = FolderLock()
            try:
                lock.take(self.folder)
            except FolderInUseError:
                time.sleep(draw.random() * 0.005)
                continue
            taken += 1
            with self._guard:
                self.holding.add(number)
                self.most = max(self.most, len(self.holding))
            time.sleep(draw.random() * 0.003)
            with self._guard:
                self.holding.discard(number)
            if draw.random() < 1 / 3:
                lock._released.set()
                entries = module._entries(self.folder)
                self.gone.update(
                    e for e in entries if e.path(self.folder) == lock._path
                )
            else:
                lock.release()


@pytest.mark.parametrize("seed", range(3))
def test_of_many_that_take_it_at_once_one_has_it(tmp_path, monkeypatch, seed):
    crowd = Crowd(tmp_path, seed)
    monkeypatch.setattr(module, "os", crowd.system)
    monkeypatch.setattr(module, "_wait_for_end", crowd.wait_for_end)
    monkeypatch.setattr(module, "_locked", lambda descriptor: False)
    threads = [
        threading.Thread(target=crowd.work, args=(number,), daemon=True)
        for number in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive()
    assert crowd.most == 1


@pytest.mark.parametrize("successor", [None, b"another's"])
def test_a_file_that_was_removed_before_it_was_seen_is_made_again(
    tmp_path, monkeypatch, successor
):
    made = []

    class Removing:
        """The module ``os``, with others that come in after the first file is made."""

        def open(self, path: Path, *rest: Any) -> int:
            descriptor = os.open(path, *rest)
            made.append(path.name)
            if len(made) == 1:
                path.unlink()
                if successor:
                    path.write_bytes(successor)
            return descriptor

        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

    monkeypatch.setattr(module, "os", Removing())
    monkeypatch.setattr(module, "_wait_for_end", lambda folder, entry: None)
    lock = FolderLock()
    lock.take(tmp_path)
    assert made == ["lock.1", "lock.2" if successor else "lock.1"]
    lock.check()
    lock.release()
    assert list(tmp_path.iterdir()) == []
