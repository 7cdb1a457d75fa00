# SPDX-License-Identifier: Apache-2.0
"""Tracebacks of users' mistakes: the user's frames, and one of Tessera's.

Beside ``jaxprs``: like it, this module may use ``jax._src``.
"""

import functools
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, cast

import jax
from jax._src import config

from tessera.jax_compat.equation_lines import OWN_FILES

_F = TypeVar("_F", bound=Callable[..., Any])


def at_boundary(function: _F) -> _F:
    """A function whose errors show, of Tessera's frames, its own alone."""

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            trim_frames(error, keep=1)
            raise  # adds no frame

    return cast(_F, bounded)


def trim_frames(error: BaseException, keep: int | None = None) -> None:
    """Leave the frames of Tessera, JAX and Python's library out of a traceback.

    ``JAX_TRACEBACK_FILTERING=off`` keeps all of them.

    So does an assertion that fails in Tessera.

    Args:
      error: The error; those that it was raised from are trimmed as well.
      keep: The number of a frame that stays in any case, from the outermost.
    """
    if config.traceback_filtering.value == "off":
        return
    frames: list[TracebackType] = []
    place = error.__traceback__
    while place is not None:
        frames.append(place)
        place = place.tb_next
    files = [each.tb_frame.f_code.co_filename for each in frames]
    if isinstance(error, AssertionError) and files[-1].startswith(OWN_FILES):
        return  # a bug of Tessera
    left: TracebackType | None = None
    for number, each in reversed([*enumerate(frames)]):
        if number == keep or not _is_hidden(files[number]):
            left = TracebackType(left, each.tb_frame, each.tb_lasti, each.tb_lineno)
    error.__traceback__ = left
    if error.__cause__ is not None:
        trim_frames(error.__cause__)


@functools.cache
def _is_hidden(path: str) -> bool:
    stdlib = sysconfig.get_path("stdlib")
    if path.startswith((*OWN_FILES, jax.__path__[0])):
        return True
    is_installed = {"site-packages", "dist-packages"} & {*Path(path).parts}
    return path.startswith(stdlib) and not is_installed
