# SPDX-License-Identifier: Apache-2.0
"""Locks the folder of a run, so that only one process writes to it.

The file ``lock`` in the folder names its holder and has a POSIX record lock, which the
system gives up with the process, however it ends; file servers do so for the machines
that they serve. A holder has always made the file itself: of two processes that find a
free one, one removes it, and one makes the next.

Where the file system has no such locks, the file alone counts, until its holder or a
person removes it: docs/contributing/decisions/0077-what-surrounds-a-run.md.
"""

import os
import shlex
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

from tessera.errors import FolderInUseError, OutputPathError, printable
from tessera.train.files.file_locks import lock
from tessera.train.loop.run_folder import cannot_write

_NAME: Final = "lock"
_LONGEST_RECORD: Final = 1000
# A holder on this machine may be just ending. Servers of NFS keep the locks of a
# machine that is gone for 90 s.
_ENDING: Final = 3.0
_SERVERS_KEEP: Final = 150.0
_PAUSE: Final = 0.2
_SAY_AFTER: Final = 2.0

# The files that this process has locked: to open and close one again would give its
# lock up.
_own: Final[set[tuple[int, int]]] = set()
# Nor does the lock of a process keep its other threads out.
_taking: Final = threading.Lock()


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

    def take(self, folder: str | Path) -> None:
        """Make a folder this process's own, and the folder itself if it is not there.

        Waits for 150 s at most, where a holder on another machine may be gone.

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
            folder.mkdir(parents=True, exist_ok=True)
            with _taking:
                while self._path is None:
                    self._make(folder / _NAME)
            command = shlex.join(sys.orig_argv)
            record = (
                f"{_machine()}\nprocess {os.getpid()} on host {socket.gethostname()}, "
                f"since {time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime())}: "
                f"{command}\n"
            )
            os.write(self._descriptor, record.encode(errors="backslashreplace"))
            os.fsync(self._descriptor)
        except (OSError, ValueError) as error:
            self.release()
            if isinstance(error, FolderInUseError):
                raise
            raise cannot_write(folder, error) from error

    def check(self) -> None:
        """Check that the folder is where it was, and still this process's.

        Raises:
          OutputPathError: [T504] it was renamed or deleted, or is another process's.
        """
        if (path := self._path) is None:
            return
        try:
            if _file_of(path.stat()) == _file_of(os.fstat(self._descriptor)):
                return
            reason = "another file is in its place"
        except OSError as error:
            reason = error.strerror or str(error)
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
            file = _file_of(os.fstat(self._descriptor))
            _remove(path, file)
            os.close(self._descriptor)
            _own.discard(file)
        with suppress(OSError, ValueError):  # there is something in it
            while self._made:
                self._made.pop(0).rmdir()

    def _make(self, path: Path) -> None:
        """Make the file and lock it, unless others are at it as well."""
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
        except FileExistsError:
            _remove_free(path)
            return
        file = _file_of(os.fstat(descriptor))
        # Others may have seen a free file before it was locked, and removed it.
        with suppress(FileNotFoundError):
            if lock(descriptor) is not False and _file_of(path.stat()) == file:
                self._path, self._descriptor = path, descriptor
                self._process = os.getpid()
                _own.add(file)
                return
        os.close(descriptor)


def _remove_free(path: Path) -> None:
    """Remove the file of a holder that is gone, once that is known.

    Raises:
      FolderInUseError: [T710] the holder is not gone.
    """
    started, is_told = time.monotonic(), False
    while True:
        try:
            if _file_of(path.lstat()) in _own:  # a link is not followed
                raise _in_use(path, "this process")
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError:
            return
        try:
            if is_free := lock(descriptor):
                _remove(path, _file_of(os.fstat(descriptor)))
                return
            record = os.pread(descriptor, _LONGEST_RECORD, 0).decode(errors="replace")
        finally:
            os.close(descriptor)
        machine, _, holder = record.partition("\n")
        waited = time.monotonic() - started
        patience = _ENDING if machine == _machine() else _SERVERS_KEEP
        if is_free is None or waited > patience:
            raise _in_use(path, printable(holder.strip()), has_locks=is_free is False)
        if waited > _SAY_AFTER and not is_told:
            is_told = True
            sys.stderr.write(f"waiting for {path}, held by {printable(holder)}\n")
        time.sleep(_PAUSE)


def _in_use(path: Path, holder: str, *, has_locks: bool = True) -> FolderInUseError:
    fix = "wait until it has ended, or end it; or use another folder: hydra.run.dir="
    fix += "<folder>"
    if not has_locks:
        fix += f"\nthe file system has no locks: if it was killed, remove {path}"
    return FolderInUseError(
        f"another run writes to the folder {path.parent}",
        got=f"{path.name}: held by {holder or 'a process that has not said who it is'}",
        fix=fix,
    )


def _remove(path: Path, file: tuple[int, int]) -> None:
    """Remove a file that this process has locked, unless another is in its place."""
    with suppress(OSError):
        if _file_of(path.stat()) == file:
            path.unlink()


def _file_of(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


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
