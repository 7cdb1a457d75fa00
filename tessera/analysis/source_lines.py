# SPDX-License-Identifier: Apache-2.0
"""Finds the line of the user's code that an operation of a compiled program comes from.

XLA records the Python stack of every operation. Most of its frames belong to JAX, Flax
or Tessera; the user's line is the innermost one that does not.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass

from tessera.jax_compat import equation_lines


@dataclass(frozen=True, slots=True)
class StackFrame:
    """One line of a Python stack."""

    file: str
    line: int
    function: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def user_line(frames: Iterable[StackFrame]) -> str:
    """``file:line`` of the innermost frame in the user's code, or ``""``.

    Args:
      frames: A stack, innermost frame first. Where every frame is of a library, the
        innermost is used.

    Example:
      >>> inner = StackFrame("/venv/site-packages/jax/lax.py", 9)
      >>> user_line([inner, StackFrame("/me/train.py", 3)])
      '/me/train.py:3'
    """
    frames = list(frames)
    own = next((f for f in frames if not equation_lines.is_library_code(f.file)), None)
    return str(own or frames[0]) if frames else ""


def short(source: str) -> str:
    """``file:line`` for tables: relative to the working folder if inside it.

    Example:
      >>> short("/elsewhere/deep/down/train.py:3")
      'down/train.py:3'
    """
    here = os.getcwd() + os.sep
    if source.startswith(here):
        return source.removeprefix(here)
    return "/".join(source.rsplit("/", 2)[-2:])
