# SPDX-License-Identifier: Apache-2.0
"""Sets up JAX's persistent compilation cache in a folder that is private to the user.

JAX loads the files of the cache as machine code. Whoever can write into the folder can
run code as the user, so it has to be private, as the keys of ssh are.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import jax

from tessera.errors import CompileCacheError

_SETTING: Final = "jax_compilation_cache_dir"


def open_compile_cache(folder: str | None) -> None:
    """Let JAX cache compiled programs in a folder, if it is private to the user.

    Writes nothing: ``make_compile_cache`` creates the folder.

    Args:
      folder: The folder. None takes JAX's own setting, for instance from
        ``JAX_COMPILATION_CACHE_DIR``, and checks it in the same way; without that,
        nothing is cached.

    Raises:
      CompileCacheError: [T709] others may read or write it, or it cannot be made.
    """
    name = jax.config.values[_SETTING] if folder is None else folder
    # Storage such as gs://… has permissions of its own.
    if name is None or (folder is None and "://" in name):
        return
    path = _resolve(name)
    if found := list(_problems(path)):
        raise CompileCacheError(
            f"the folder of compiled programs is not yours alone: {path}",
            got="\n".join(found),
            fix=f"chmod 700 {path}\nor take another: runtime.compile_cache=<folder>",
        )
    jax.config.update(_SETTING, str(path))


def make_compile_cache() -> None:
    """Create the folder of ``open_compile_cache``, with mode 700, if it is missing."""
    name = jax.config.values[_SETTING]
    if name is not None and "://" not in name:
        path = Path(name)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        # JAX may have created it first, readable by others.
        path.chmod(0o700)


def _resolve(folder: str) -> Path:
    """The folder without links in its path, if it exists or can be created."""
    try:
        path = Path(folder).expanduser().absolute()
        with suppress(FileNotFoundError):
            path.lstat()  # raises if the name is too long, or invalid
        existing = next(p for p in (path, *path.parents) if os.path.lexists(p))
        if not stat.S_ISDIR(existing.stat().st_mode):
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if existing != path and not os.access(existing, os.W_OK | os.X_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        return path.resolve()
    except (OSError, ValueError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise CompileCacheError(
            "the folder of compiled programs cannot be made",
            got=f"{folder!r}: {reason or error}",
            fix="give leave to write there, or take another: "
            "runtime.compile_cache=<folder>",
        ) from error


def _problems(path: Path) -> Iterator[str]:
    if path.exists():
        status, user = path.stat(), os.geteuid()
        mode = stat.S_IMODE(status.st_mode)
        if status.st_uid != user:
            yield f"it belongs to user {status.st_uid}, and this is user {user}"
        if mode & 0o077:
            verb = "write" if mode & 0o022 else "look into"
            yield f"others may {verb} it: its mode is {mode:o}"
    for parent in filter(Path.exists, path.parents):
        mode = parent.stat().st_mode
        # With the sticky bit, as /tmp has it, users may rename only what they own.
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            yield f"everyone may put another one in its place: {parent} is writable"
