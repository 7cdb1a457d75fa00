# SPDX-License-Identifier: Apache-2.0
"""Source lines of equations: distinguishes users' code from library code.

Beside ``jaxprs``: like it, this module may use ``jax._src``.
"""

import functools
import itertools
import os
import sysconfig
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jax._src import config, source_info_util, traceback_util

PACKAGE = Path(__file__).parents[1]
# Of the layer: models and the trainer count as user code.
OWN_FILES = tuple(str(path) for path in PACKAGE.iterdir() if path.name != "train")

_LIBRARIES = ("jax", "jaxlib", "flax", "optax")
_INSTALLED = ("site-packages", "dist-packages")


def lines_in_cache_key() -> AbstractContextManager[Any]:
    """Within it, JAX's cache has a program only for the same source lines and names.

    JAX's own key leaves both out. The ledger of collectives would show the lines of an
    older source, and tells by names what is planned.
    ``JAX_COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY=0`` keeps JAX's key.
    """
    if "JAX_COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY" in os.environ:
        return nullcontext()
    return config.compilation_cache_include_metadata_in_key(True)


def hide_library_frames() -> None:
    """Make JAX omit the layer's frames from its tracebacks and source lines."""
    for path in OWN_FILES:
        if path not in traceback_util._exclude_paths:
            traceback_util.register_exclusion(path)
            source_info_util.register_exclusion(path)


@functools.cache
def is_library_code(path: str) -> bool:
    """Whether a source file is of Python, JAX, Flax, Optax or Tessera itself.

    The names of the folders above the libraries do not matter.
    """
    file = Path(path)
    if any(file.is_relative_to(place) for place in OWN_FILES):
        return True
    for folder, name in reversed([*itertools.pairwise(file.parts)]):
        if folder in _INSTALLED:  # of this machine, or of the one that compiled
            return name in _LIBRARIES
    return any(file.is_relative_to(place) for place in _elsewhere())


@functools.cache
def _elsewhere() -> list[str]:
    """Python's library, and the other libraries where not in ``site-packages``."""
    specs = filter(None, map(find_spec, _LIBRARIES))
    folders = [os.path.dirname(spec.origin) for spec in specs if spec.origin]
    return [sysconfig.get_path("stdlib"), *folders]


def source_line(equation: Any) -> str:
    """``file.py:12`` of the user's line that an equation comes from, or ``""``.

    It is the line that a compiled program has for the operation: the innermost one that
    is no library code, among the frames that JAX records.
    """
    limit = config.traceback_in_locations_limit.value
    every = source_info_util.user_frames(equation.source_info.traceback)
    frames = list(itertools.islice(every, limit if limit >= 0 else None))
    of_user = (frame for frame in frames if not is_library_code(frame.file_name))
    frame = next(of_user, frames[0] if frames else None)
    return f"{frame.file_name}:{frame.start_line}" if frame else ""
