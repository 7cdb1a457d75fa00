# SPDX-License-Identifier: Apache-2.0
"""Whose lines operations come from: the user's, or those of libraries and Tessera.

A door beside ``_jax``: like it, this module may use ``jax._src``.
"""

import functools
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jax._src import config, source_info_util, traceback_util

PACKAGE = Path(__file__).parent

_FOLDERS = ("graph", "ops", "analysis", "annotations")
_FACADES = ("arrays.py", "dist.py")
_DOORS = ("_jax.py", "_jax_processes.py", "_jax_sources.py", "_jax_traces.py")
_FILES = (*_FACADES, "scope.py", "shard.py", "spec.py", "grid.py", "mesh.py", *_DOORS)
_MACHINERY = (*_FOLDERS, *_FILES)


def hide_machinery() -> None:
    """Make JAX leave Tessera's own frames out of tracebacks and source lines.

    Models and the trainer are user code in this sense: their lines are shown.
    """
    for name in _MACHINERY:
        path = str(PACKAGE / name)
        if path not in traceback_util._exclude_paths:
            traceback_util.register_exclusion(path)
            source_info_util.register_exclusion(path)


@functools.cache
def is_machinery(path: str) -> bool:
    """Whether a source file is part of JAX, Flax, Optax or Tessera's own machinery."""
    hidden: Iterable[Path] = (PACKAGE / name for name in _MACHINERY)
    if any(Path(path).is_relative_to(place) for place in hidden):
        return True
    return any(f"/site-packages/{name}/" in path for name in ("jax", "flax", "optax"))


def source_line(equation: Any) -> str:
    """``file.py:12`` of the user's line that an equation comes from, or ``""``.

    It is the line that a compiled program has for the operation: the innermost that is
    no machinery, of as many frames as JAX writes down.
    """
    limit = config.traceback_in_locations_limit.value
    every = source_info_util.user_frames(equation.source_info.traceback)
    frames = list(itertools.islice(every, limit if limit >= 0 else None))
    of_user = (frame for frame in frames if not is_machinery(frame.file_name))
    frame = next(of_user, frames[0] if frames else None)
    return f"{frame.file_name}:{frame.start_line}" if frame else ""
