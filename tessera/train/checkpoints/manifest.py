# SPDX-License-Identifier: Apache-2.0
"""Writes and verifies the checksums of a checkpoint's files: ``manifest.sha256``.

A checkpoint counts once this file exists and its checksums match: it is written last
and read first. Orbax notices missing files, but not a flipped bit in an array. The
format is that of ``sha256sum``, so anyone can verify a checkpoint without Tessera:
``cd checkpoints/100 && sha256sum -c manifest.sha256``.
"""

import hashlib
import os
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

from tessera.train.files.regular_files import read_regular
from tessera.train.loop.run_folder import sync_folder, write_durably

NAME: Final = "manifest.sha256"
# Its line comes last, so that a manifest without its end is recognized.
LAST: Final = "metadata.json"

# A line has about 120 characters, and each process writes one or two dozen files.
_MAX_BYTES: Final = 2**24
_LINE: Final = re.compile(r"([0-9a-f]{64})  (\S.*)")
# hashlib releases the interpreter lock; more threads than this are faster than disks.
_THREADS: Final = max(1, min(4, (os.cpu_count() or 1) // 2))


def write_manifest(folder: Path) -> int:
    """Write the checksums of every file in a folder; syncs all of it to the disk.

    Args:
      folder: A checkpoint, with its ``metadata.json``.

    Returns:
      Bytes of its files.

    Raises:
      OSError: A file cannot be read, or the manifest cannot be written.
    """
    files = (path for path in folder.rglob("*") if not path.is_dir())
    names = {path.relative_to(folder).as_posix() for path in files}
    names = [*sorted(names - {LAST}), LAST]
    with ThreadPoolExecutor(_THREADS) as threads:
        paths = map(folder.joinpath, names)
        checksums = list(threads.map(partial(_checksum, sync=True), paths))
    for path in {folder, *((folder / name).parent for name in names)}:
        sync_folder(path)
    lines = [
        f"{sha}  {name}\n" for (sha, _), name in zip(checksums, names, strict=True)
    ]
    write_durably(folder / NAME, lines)
    return sum(size for _, size in checksums)


def find_damage(folder: Path) -> str | None:
    """What is wrong with a complete checkpoint; None if all checksums match."""
    try:
        content = read_regular(folder / NAME, _MAX_BYTES)
        lines = content.decode("ascii").split("\n")
    except (OSError, ValueError) as error:
        return f"{NAME} cannot be read: {error}"
    checksums: dict[str, str] = {}
    for line in lines[:-1]:
        if (match := _LINE.fullmatch(line)) is None:
            return f"{NAME} is not complete"
        checksum, name = match.groups()
        if name in checksums or Path(name).as_posix() != name:
            return f"{NAME} names a file twice: {name}"
        checksums[name] = checksum
    if lines[-1] or [*checksums][-1:] != [LAST]:
        return f"{NAME} is not complete"
    with ThreadPoolExecutor(_THREADS) as threads:
        damages = threads.map(partial(_compare, folder), checksums.values(), checksums)
        return next(filter(None, damages), None)


def _compare(folder: Path, expected: str, name: str) -> str | None:
    path = folder / name
    if Path(name).is_absolute() or ".." in Path(name).parts:
        return f"{NAME} names a file outside of the checkpoint: {name}"
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return f"{name} is not a regular file"
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
