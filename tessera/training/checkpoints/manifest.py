# SPDX-License-Identifier: Apache-2.0
"""The checksums of a checkpoint's files: written last, and looked at first.

A checkpoint counts when this file is there and holds. Orbax finds missing files, but no
flipped bit of an array. The form is that of ``sha256sum``, so a person needs no Tessera
to look: ``cd checkpoints/100 && sha256sum -c manifest.sha256``.
"""

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

from tessera.training.outputs import sync_folder, write_durably

NAME: Final = "manifest.sha256"
# The last line is this file's, so that a manifest that lost its end is known by it.
LAST: Final = "metadata.json"

# A line has about 120 characters, and each process a dozen files or two.
_LONGEST: Final = 2**28
_LINE: Final = re.compile(r"([0-9a-f]{64})  (\S.*)")
# hashlib lets other threads run while it reads; more than these are faster than disks.
_THREADS: Final = max(1, min(4, (os.cpu_count() or 1) // 2))


def write_manifest(folder: Path) -> int:
    """Write the checksums of every file in a folder, all of it safely on the disk.

    Args:
      folder: A checkpoint, with its ``metadata.json``.

    Returns:
      Bytes of its files.

    Raises:
      OSError: A file cannot be read, or the manifest not be written.
    """
    names = [*sorted(name for name in _files(folder) if name != LAST), LAST]
    with ThreadPoolExecutor(_THREADS) as threads:
        sums = list(
            threads.map(partial(_checksum, sync=True), map(folder.joinpath, names))
        )
    for path in {folder, *(path.parent for path in map(folder.joinpath, names))}:
        sync_folder(path)
    lines = [f"{sha}  {name}\n" for (sha, _), name in zip(sums, names, strict=True)]
    write_durably(folder / NAME, lines)
    return sum(size for _, size in sums)


def find_damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint that has a manifest; None where nothing is."""
    try:
        with (folder / NAME).open("rb") as file:
            lines = file.read(_LONGEST).decode("ascii").split("\n")
    except (OSError, ValueError) as error:
        return f"{NAME} cannot be read: {error}"
    parsed = [_LINE.fullmatch(line) for line in lines[:-1]]
    names = [line[2] for line in parsed if line is not None]
    if None in parsed or lines[-1] or names[-1:] != [LAST]:
        return f"{NAME} is not whole"
    sums = [line[1] for line in parsed if line is not None]
    with ThreadPoolExecutor(_THREADS) as threads:
        found = threads.map(partial(_compare, folder), names, sums)
        return next((damage for damage in found if damage), None)


def _files(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*"):
        if not path.is_dir():
            yield path.relative_to(folder).as_posix()


def _compare(folder: Path, name: str, expected: str) -> str | None:
    path = folder / name
    if Path(name).is_absolute() or ".." in Path(name).parts:
        return f"{NAME} names a file outside of the checkpoint: {name}"
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return f"{name} is no file"
        checksum, _ = _checksum(path, sync=False)
    except FileNotFoundError:
        return f"{name} is missing"
    except (OSError, ValueError) as error:
        return f"{name} cannot be read: {error}"
    return None if checksum == expected else f"{name} is not what was written"


def _checksum(path: Path, *, sync: bool) -> tuple[str, int]:
    with path.open("rb", buffering=0) as file:
        if sync:
            os.fsync(file.fileno())
        size = os.fstat(file.fileno()).st_size
        return hashlib.file_digest(file, "sha256").hexdigest(), size
