# SPDX-License-Identifier: Apache-2.0
"""Where a command writes: checked before the work, and coded errors while it writes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tessera.errors import OutputPathError

DTYPE_NAMES = ("f32", "bf16", "f16", "float32", "bfloat16", "float16")
"""What an option of a dtype may be."""


def check_output(what: str, file: str | Path, *, is_folder: bool = False) -> None:
    """Check that a file can be put there, and that nothing but a file would go.

    Args:
      what: What is to be written, for the message.
      file: Where to.
      is_folder: Whether a folder is written, which may be there.

    Raises:
      OutputPathError: [T504] it cannot.
    """
    file = str(file)
    if not Path(file).name or "\0" in file:
        raise cannot_write(what, file, "it names no file")
    with coded_errors(what, file):
        is_file = Path(file).is_file() or is_folder
        if os.path.lexists(file) and not is_file:
            raise cannot_write(what, file, "it is there, and it is no regular file")
        if not Path(file).absolute().parent.is_dir():
            raise cannot_write(what, file, "its folder does not exist")


@contextmanager
def coded_errors(what: str, file: str | Path) -> Iterator[None]:
    """Turn errors of the operating system into T504."""
    try:
        yield
    except OSError as error:
        raise cannot_write(what, file, error.strerror or str(error)) from error


def cannot_write(what: str, file: str | Path, why: str) -> OutputPathError:
    """The error of a file that cannot be written."""
    return OutputPathError(
        f"{what} cannot be written",
        got=f"{str(file)!r}: {why}",
        fix="name a file in a folder that is there and that has room for it",
    )
