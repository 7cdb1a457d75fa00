# SPDX-License-Identifier: Apache-2.0
"""Checks that a path is a regular file before it is read.

Reading a pipe or a device may never end. The same is true of files that the kernel
generates (``/proc``, ``/sys``), which also contain secrets of the machine.
"""

import errno
import os
import stat
from pathlib import Path

_KERNEL_FOLDERS = (Path("/proc"), Path("/sys"))


def check_regular(path: str | Path) -> None:
    """Check that a path is a regular file, without opening it.

    Raises:
      OSError: It is something else, or does not exist.

    Example:
      >>> check_regular("/dev/null")
      Traceback (most recent call last):
      ...
      OSError: [Errno 22] it is not a regular file: '/dev/null'
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    if is_kernel_file(path):
        raise OSError(
            errno.EINVAL, "the kernel generates it when it is read", str(path)
        )


def read_regular(path: str | Path, longest: int) -> bytes:
    """The content of a regular file that is read whole.

    Args:
      path: The file.
      longest: The most bytes that it may have.

    Raises:
      OSError: It is no such file, is longer, or cannot be read.
    """
    check_regular(path)
    with open(path, "rb") as file:
        content = file.read(longest + 1)
    if len(content) > longest:
        raise OSError(errno.EFBIG, f"it has more than {longest:,} bytes", str(path))
    return content


def is_kernel_file(path: str | Path) -> bool:
    """Whether a path is in ``/proc`` or ``/sys``, symbolic links resolved."""
    if "\0" in str(path):
        return False
    real = Path(os.path.realpath(path))
    return any(real.is_relative_to(folder) for folder in _KERNEL_FOLDERS)
