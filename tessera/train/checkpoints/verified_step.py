# SPDX-License-Identifier: Apache-2.0
"""Reads and writes ``checkpoints/verified``: up to which step checkpoints are verified.

A checkpoint counts as verified if a step after it was repeated on other devices with
the same result (``runtime.verify_every``). The file has the number of the last such
step, so the checkpoints themselves, whose checksums are written once, stay as they are.
"""

from contextlib import suppress
from pathlib import Path
from typing import Final

from tessera.train.loop.run_folder import write_durably

_NAME: Final = "verified"
_LONGEST: Final = 20


def read_verified_step(root: Path) -> int:
    """The last verified step of a folder of checkpoints; 0 without a record.

    What is not a number counts as no record: its checkpoints are not verified.
    """
    with suppress(OSError, ValueError):
        with (root / _NAME).open("rb") as file:
            text = file.read(_LONGEST).decode("ascii").strip()
        if text.isdecimal():
            return int(text)
    return 0


def write_verified_step(root: Path, step: int) -> None:
    """Record the last verified step.

    Raises:
      OSError: It cannot be written.
    """
    write_durably(root / _NAME, (f"{step}\n",))
