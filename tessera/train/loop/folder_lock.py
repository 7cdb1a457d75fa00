# SPDX-License-Identifier: Apache-2.0
"""Locks the folder of a run, so that only one process writes to it.

``lock.3`` in the folder of a run names its writer: host, process, start and command.
The highest number is the holder's. To take the folder is to make the file with the next
number, which is atomic on every file system: of two processes that take it at once, one
finds the file made.

A holder is known to be gone by its record lock, which the system gives up with the
process. Where the file system has no such locks, or may not show those of another
machine, it is known by silence: a holder changes the time of its file every five
seconds, and whoever waits has seen no change for 30, by a clock of its own. Clocks of
two machines are never compared. The reasons are in
docs/contributing/decisions/0034-one-run-per-folder.md.
"""

import json
import os
import re
import shlex
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Final, Self

from tessera.errors import FolderInUseError, OutputPathError
from tessera.errors.untrusted_text import count_of, parse_json, printable, text_of
from tessera.train.files.file_locks import is_locked, lock
from tessera.train.loop.run_folder import cannot_write

_NAME: Final = re.compile(r"lock\.[1-9][0-9]*")
_LONGEST_RECORD: Final = 4096
_LONGEST_COMMAND: Final = 400

# How often a holder changes its file, and how long one is silent that is gone.
_BEAT: Final = 5.0
_SILENCE: Final = 30.0
# A holder that is locked and silent has lost its machine: servers of NFS keep the locks
# of one for 90 s. On this machine it is just ending.
_SERVERS_KEEP: Final = 150.0
_ENDING: Final = 3.0
_PAUSE: Final = 0.2
_SAY_AFTER: Final = 2.0

# The files that this process has locked, which it must not open again.
_own: Final[set[tuple[int, int]]] = set()


@dataclass(frozen=True)
class Holder:
    """Who writes to a folder, as its file says.

    Attributes:
      machine: A name that no other machine has, nor this one after its next start.
      host: What people call it.
      process: Its number there.
      since: When it took the folder, by its clock.
      command: What was started.
      is_locked: Whether the file system gave it a record lock.
    """

    machine: str
    host: str
    process: int
    since: str
    command: str
    is_locked: bool

    @classmethod
    def this(cls, *, is_locked: bool) -> Self:
        """This process."""
        return cls(
            _machine(),
            socket.gethostname(),
            os.getpid(),
            time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            shlex.join(sys.orig_argv)[:_LONGEST_COMMAND],
            is_locked,
        )

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """What a file says; None where it says nothing that can be used."""
        try:
            with path.open("rb") as file:
                record = parse_json(file.read(_LONGEST_RECORD), longest=_LONGEST_RECORD)
            texts = {
                name: printable(text_of(record[name]), longest=_LONGEST_COMMAND)
                for name in ("machine", "host", "since", "command")
            }
            process = count_of(record["process"])
            return cls(**texts, process=process, is_locked=record["is_locked"] is True)
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def __str__(self) -> str:
        return (
            f"process {self.process} on host {self.host}, since {self.since}: "
            f"{self.command}"
        )


@dataclass(frozen=True, order=True)
class _Entry:
    """A file of the folder's holders.

    Attributes:
      number: That of its name.
      file: Which file it is.
      times: When it was changed, which tells it from a later one in its place.
    """

    number: int
    file: tuple[int, int]
    times: tuple[int, int]

    def path(self, folder: Path) -> Path:
        """Its path in the folder."""
        return folder / f"lock.{self.number}"


class FolderLock:
    """The lock of a run's folder; holds none until ``take``.

    Example:
      >>> import tempfile
      >>> folder_lock = FolderLock()
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     folder_lock.take(folder)
      ...     folder_lock.check()
      ...     folder_lock.release()
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._descriptor = -1
        self._process = 0
        self._made: list[Path] = []
        self._released = threading.Event()

    def take(self, folder: str | Path) -> None:
        """Make a folder this process's own, and the folder itself if it is not there.

        Waits for 150 s at most, where a holder may be gone and that has to be seen.

        Args:
          folder: Of the run.

        Raises:
          FolderInUseError: [T710] another process holds it.
          OutputPathError: [T504] nothing can be written there.
        """
        assert self._path is None, "a lock is taken once"
        folder = Path(folder).absolute()
        try:
            self._made = [*_missing(folder)]
            while self._path is None:
                self._take_next(folder)
            self._sign(folder)
        except (OSError, ValueError) as error:
            self.release()
            if isinstance(error, FolderInUseError):
                raise
            raise cannot_write(folder, error) from error
        threading.Thread(target=self._beat, daemon=True).start()

    def check(self) -> None:
        """Check that the folder is where it was, and still this process's.

        Raises:
          OutputPathError: [T504] it was renamed or deleted.
          FolderInUseError: [T710] another process has taken it, after this one was
            silent for too long.
        """
        path = self._path
        if path is None:
            return
        try:
            if _file_of(path.stat()) == _file_of(os.fstat(self._descriptor)):
                return
            reason = "another file is in its place"
        except OSError as error:
            reason = error.strerror or str(error)
        newest = max(_entries(path.parent), default=None)
        if newest is not None and newest.number > _number(path.name):
            raise _in_use(path.parent, newest)
        raise OutputPathError(
            "the folder of the run is not where it was",
            got=f"{path}: {reason}",
            fix="leave it in its place until the run has ended; to go on, put it back "
            "there and use training.resume=auto",
        )

    def release(self) -> None:
        """Give the folder up, and remove it where it was made for nothing."""
        path, self._path = self._path, None
        if path is not None and self._process == os.getpid():  # it may have been forked
            self._released.set()
            file = _file_of(os.fstat(self._descriptor))
            _remove(path, file)
            os.close(self._descriptor)
            _own.discard(file)
        with suppress(OSError, ValueError):  # there is something in it
            while self._made:
                self._made.pop(0).rmdir()

    def _take_next(self, folder: Path) -> None:
        """Make the file with the next number, unless others are at it as well."""
        folder.mkdir(parents=True, exist_ok=True)
        before = max(_entries(folder), default=None)
        if before is not None:
            _wait_for_end(folder, before)
        number = before.number + 1 if before else 1
        path = folder / f"lock.{number}"
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
        except (FileExistsError, FileNotFoundError):
            return
        file, entries = _file_of(os.fstat(descriptor)), [*_entries(folder)]
        # What was looked at is still there, and nothing came after it: others may have
        # come and gone meanwhile, removed this file, and begun to count anew.
        is_newest = bool(entries) and max(entries).file == file
        if not is_newest or (before and before not in entries):
            _remove(path, file)
            os.close(descriptor)
            return
        self._path, self._descriptor = path, descriptor
        self._process = os.getpid()
        _own.add(file)

    def _sign(self, folder: Path) -> None:
        """Write who holds it, and remove what earlier holders left."""
        assert self._path is not None
        holder = Holder.this(is_locked=_locked(self._descriptor))
        os.write(self._descriptor, json.dumps(asdict(holder)).encode() + b"\n")
        os.fsync(self._descriptor)
        for old in _entries(folder):
            if old.number < _number(self._path.name):
                old.path(folder).unlink(missing_ok=True)

    def _beat(self) -> None:
        # Where the folder is another's, whoever writes learns it from ``check``.
        while not self._released.wait(_BEAT):
            with suppress(OSError):
                os.utime(self._descriptor)


def _wait_for_end(folder: Path, entry: _Entry) -> None:
    """Return once a holder is known to be gone.

    Raises:
      FolderInUseError: [T710] it is not.
    """
    path, started, first, is_told = entry.path(folder), time.monotonic(), None, False
    while True:
        if entry.file in _own:
            raise _in_use(folder, entry)
        try:
            holder, is_held, now = Holder.read(path), is_locked(path), _time_of(path)
        except FileNotFoundError:
            return
        waited, first = time.monotonic() - started, first or now
        is_here = holder is not None and holder.machine == _machine()
        if is_held is False and is_here and holder is not None and holder.is_locked:
            return
        if now != first or (is_here and is_held and waited > _ENDING):
            raise _in_use(folder, entry)
        if waited > (_SERVERS_KEEP if is_held else _SILENCE):
            if is_held:
                raise _in_use(folder, entry)
            return
        if waited > _SAY_AFTER and not is_told:
            is_told = True
            sys.stderr.write(f"waiting for {folder}, which was held by {holder}\n")
        time.sleep(_PAUSE)


def _in_use(folder: Path, entry: _Entry) -> FolderInUseError:
    # To open a file of its own, and close it, would give up its lock.
    is_own = entry.file in _own
    holder = "this process" if is_own else Holder.read(entry.path(folder))
    return FolderInUseError(
        f"another run writes to the folder {folder}",
        got=f"{entry.path(folder).name}: held by "
        f"{holder or 'a process that has not written who it is'}",
        fix="wait until it has ended, or end it; or use another folder: "
        "hydra.run.dir=<folder>",
    )


def _entries(folder: Path) -> Iterator[_Entry]:
    """The files of a folder's holders; none where there is no folder."""
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for file in entries:
            if _NAME.fullmatch(file.name):
                with suppress(FileNotFoundError):
                    status = file.stat(follow_symlinks=False)
                    times = status.st_mtime_ns, status.st_ctime_ns
                    yield _Entry(_number(file.name), _file_of(status), times)


def _remove(path: Path, file: tuple[int, int]) -> None:
    """Remove a file that is open, unless another is in its place by now."""
    with suppress(OSError):
        if _file_of(path.stat()) == file:
            path.unlink()


def _number(name: str) -> int:
    return int(name.removeprefix("lock."))


def _file_of(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _time_of(path: Path) -> tuple[int, int]:
    """When a file was changed, and its size; opened, so that NFS asks its server."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
    return status.st_mtime_ns, status.st_size


def _locked(descriptor: int) -> bool:
    """Whether a file can be locked; one that others look at just now is tried again."""
    for _ in range(40):
        is_mine = lock(descriptor)
        if is_mine is not False:
            return bool(is_mine)
        time.sleep(0.05)
    return False


def _missing(folder: Path) -> Iterator[Path]:
    """The folders that have to be made for one, the last one first."""
    for path in (folder, *folder.parents):
        if path.exists():
            return
        yield path


@cache
def _machine() -> str:
    """A name of this machine from its start to its next one."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return f"{socket.gethostname()} {uuid.getnode():x}"
