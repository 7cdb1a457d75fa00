# SPDX-License-Identifier: Apache-2.0
"""Files that have an end, told from what only looks like one.

A pipe may be waited for and a device read for ever. What the kernel makes up as it is
read (``/proc``, ``/sys``) may do the same, and holds the machine's secrets.
"""

import errno
import os
import stat
from pathlib import Path

_MADE_BY_THE_KERNEL = (Path("/proc"), Path("/sys"))


def check_regular(path: str | Path) -> None:
    """See that a path leads to a regular file, before anything opens it.

    Raises:
      OSError: It leads to something else, or to nothing.

    Example:
      >>> check_regular("/dev/null")
      Traceback (most recent call last):
      ...
      OSError: [Errno 22] it is no regular file: '/dev/null'
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    if is_made_by_the_kernel(path):
        raise OSError(errno.EINVAL, "the kernel makes it up as it is read", str(path))


def is_made_by_the_kernel(path: str | Path) -> bool:
    """Whether a path, its links followed, is in ``/proc`` or ``/sys``."""
    if "\0" in str(path):
        return False
    real = Path(os.path.realpath(path))
    return any(real.is_relative_to(folder) for folder in _MADE_BY_THE_KERNEL)
