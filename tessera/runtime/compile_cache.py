# SPDX-License-Identifier: Apache-2.0
"""The folder of compiled programs, from which later runs start sooner.

JAX loads what it finds there as machine code. Whoever can write into the folder can run
code as the user, so it is the user's alone, as the keys of ssh are.
"""

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import jax

from tessera.errors import CompileCacheError

_SETTING: Final = "jax_compilation_cache_dir"


def open_compile_cache(folder: str | None) -> None:
    """Let JAX keep compiled programs in a folder, if that is the user's alone.

    Args:
      folder: Made, with mode 700, if it is not there. None takes the one that JAX has
        been given, by ``JAX_COMPILATION_CACHE_DIR`` for instance, which is looked at in
        the same way; without one nothing is kept.

    Raises:
      CompileCacheError: [T709] others may read or write it, or it cannot be made.
    """
    given = jax.config.values[_SETTING] if folder is None else folder
    # What is not a folder, as gs://…, has its own ways to be private.
    if given is None or (folder is None and "://" in given):
        return
    path = _made(given)
    if found := list(_problems(path)):
        raise CompileCacheError(
            f"the folder of compiled programs is not yours alone: {path}",
            got="\n".join(found),
            fix=f"chmod 700 {path}\nor take another: runtime.compile_cache=<folder>",
        )
    jax.config.update(_SETTING, str(path))


def _made(folder: str) -> Path:
    """The folder without links in its path, made if it is not there."""
    try:
        path = Path(folder).expanduser()
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path.resolve(strict=True)
    except (OSError, ValueError, RuntimeError) as error:
        said = error.strerror if isinstance(error, OSError) else None
        raise CompileCacheError(
            "the folder of compiled programs cannot be made",
            got=f"{folder!r}: {said or error}",
            fix="give leave to write there, or take another: "
            "runtime.compile_cache=<folder>",
        ) from error


def _problems(path: Path) -> Iterator[str]:
    here, user = path.stat(), os.geteuid()
    if here.st_uid != user:
        yield f"it belongs to user {here.st_uid}, and this is user {user}"
    if mode := stat.S_IMODE(here.st_mode) & 0o077:
        verb = "write" if mode & 0o022 else "look into"
        yield f"others may {verb} it: its mode is {stat.S_IMODE(here.st_mode):o}"
    for parent in path.parents:
        mode = parent.stat().st_mode
        # In a folder as /tmp, with the sticky bit, each may rename only what is theirs.
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            yield f"everyone may put another one in its place: {parent} is writable"
