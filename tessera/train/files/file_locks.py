# SPDX-License-Identifier: Apache-2.0
"""File locks that the system releases when the process that holds them ends.

They are POSIX record locks: they belong to a process, not to its children, and work on
NFS, Lustre and other servers. Closing any descriptor of the file in the process
releases the lock too, so a locked file must be opened only once.
"""

import errno
import fcntl
from pathlib import Path

_HELD_BY_ANOTHER = (errno.EACCES, errno.EAGAIN)


def lock(descriptor: int) -> bool | None:
    """Lock a file for as long as this process lives and keeps it open.

    Args:
      descriptor: Descriptor of the file, open for writing.

    Returns:
      Whether it is locked: False if another process holds the lock, None if the file
      system does not support locks.
    """
    return _try_lock(descriptor, fcntl.LOCK_EX)


def is_locked(path: Path) -> bool | None:
    """Whether another process has locked a file; None if locks are not supported.

    Must not be called for a file that this process has locked.

    Raises:
      OSError: It cannot be read.
    """
    with path.open("rb") as file:
        is_free = _try_lock(file.fileno(), fcntl.LOCK_SH)
    return None if is_free is None else not is_free


def _try_lock(descriptor: int, kind: int) -> bool | None:
    try:
        fcntl.lockf(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in _HELD_BY_ANOTHER else None
    return True
