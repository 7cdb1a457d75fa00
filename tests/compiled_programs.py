# SPDX-License-Identifier: Apache-2.0
"""Where the tests keep what XLA compiled, between runs.

JAX finds a program by its text, the versions, the flags and the compiler's options, so
that a test gets what it would have compiled. A file that is torn costs a compilation.
"""

import atexit
import hashlib
import os
import platform
import shutil
import tempfile
from pathlib import Path

MOST_BYTES = 2**30  # more than that is mostly programs of older sources


def folder_of_compiled_programs() -> str:
    """A folder for this kind of processor in the user's cache; else a temporary one."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "tessera-tests" / _processor()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if sum(entry.stat().st_size for entry in os.scandir(folder)) > MOST_BYTES:
            shutil.rmtree(folder)
            folder.mkdir(mode=0o700)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        name = tempfile.mkdtemp(prefix="tessera-tests-")
        atexit.register(shutil.rmtree, name, ignore_errors=True)
        return name
    return str(folder)


def _processor() -> str:
    """A name for the instructions that this processor has."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        has = next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        has = platform.processor()
    return hashlib.sha256(f"{platform.machine()} {has}".encode()).hexdigest()[:16]
