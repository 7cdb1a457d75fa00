# SPDX-License-Identifier: Apache-2.0
"""The folder of compiled programs, from which later runs start sooner.

JAX loads what it finds there as machine code. Whoever can write into the folder can run
code as the user, so it is the user's alone, as the keys of ssh are.
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
    """Let JAX keep compiled programs in a folder, if that is the user's alone.

    Nothing is written: ``make_compile_cache`` makes it where it is not there.

    Args:
      folder: The folder. None takes the one that JAX has been given, by
        ``JAX_COMPILATION_CACHE_DIR`` for instance, which is looked at in the same way;
        without one nothing is kept.

    Raises:
      CompileCacheError: [T709] others may read or write it, or it cannot be made.
    """
    given = jax.config.values[_SETTING] if folder is None else folder
    # What is not a folder, as gs://…, has its own ways to be private.
    if given is None or (folder is None and "://" in given):
        return
    path = _checked(given)
    if found := list(_problems(path)):
        raise CompileCacheError(
            f"the folder of compiled programs is not yours alone: {path}",
            got="\n".join(found),
            fix=f"chmod 700 {path}\nor take another: runtime.compile_cache=<folder>",
        )
    jax.config.update(_SETTING, str(path))


def make_compile_cache() -> None:
    """Make the folder of ``open_compile_cache``, with mode 700, if it is not there."""
    given = jax.config.values[_SETTING]
    if given is not None and "://" not in given:
        path = Path(given)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        # JAX may have made it first, for others to look into.
        path.chmod(0o700)


def _checked(folder: str) -> Path:
    """The folder without links in its path; it is there, or it can be made."""
    try:
        path = Path(folder).expanduser().absolute()
        with suppress(FileNotFoundError):
            path.lstat()  # a name may be too long, or none
        there = next(each for each in (path, *path.parents) if os.path.lexists(each))
        if not stat.S_ISDIR(there.stat().st_mode):
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if there != path and not os.access(there, os.W_OK | os.X_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        return path.resolve()
    except (OSError, ValueError, RuntimeError) as error:
        said = error.strerror if isinstance(error, OSError) else None
        raise CompileCacheError(
            "the folder of compiled programs cannot be made",
            got=f"{folder!r}: {said or error}",
            fix="give leave to write there, or take another: "
            "runtime.compile_cache=<folder>",
        ) from error


def _problems(path: Path) -> Iterator[str]:
    if path.exists():
        here, user = path.stat(), os.geteuid()
        if here.st_uid != user:
            yield f"it belongs to user {here.st_uid}, and this is user {user}"
        if mode := stat.S_IMODE(here.st_mode) & 0o077:
            verb = "write" if mode & 0o022 else "look into"
            yield f"others may {verb} it: its mode is {stat.S_IMODE(here.st_mode):o}"
    for parent in filter(Path.exists, path.parents):
        mode = parent.stat().st_mode
        # In a folder as /tmp, with the sticky bit, each may rename only what is theirs.
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            yield f"everyone may put another one in its place: {parent} is writable"
