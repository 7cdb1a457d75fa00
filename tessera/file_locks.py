# SPDX-License-Identifier: Apache-2.0
"""Locks of files that the system gives up when the process that holds them ends.

They are the record locks of POSIX: of a process, not of what it has forked, and known
to the servers of NFS, Lustre and others. Closing any descriptor of the file in the
process gives the lock up as well, so a file that is locked is opened once.
"""

import errno
import fcntl
from pathlib import Path

_HELD_BY_ANOTHER = (errno.EACCES, errno.EAGAIN)


def lock(descriptor: int) -> bool | None:
    """Lock a file for as long as this process lives and keeps it open.

    Args:
      descriptor: Of the file, open for writing.

    Returns:
      Whether it is locked: False where another process holds it, None where the file
      system has no locks.
    """
    return _tried(descriptor, fcntl.LOCK_EX)


def is_locked(path: Path) -> bool | None:
    """Whether another process has locked a file; None where there are no locks.

    Never asked of a file that this process has locked.

    Raises:
      OSError: It cannot be read.
    """
    with path.open("rb") as file:
        found = _tried(file.fileno(), fcntl.LOCK_SH)
    return None if found is None else not found


def _tried(descriptor: int, kind: int) -> bool | None:
    try:
        fcntl.lockf(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in _HELD_BY_ANOTHER else None
    return True
