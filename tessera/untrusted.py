# SPDX-License-Identifier: Apache-2.0
"""Text that another program wrote: parsed strictly, shown without its escape sequences.

It comes from other ranks over a socket, or from files that anybody may have changed.
"""

import json
import math
from collections.abc import Sequence
from typing import Any, Final

_LARGEST_COUNT: Final = 2**53


def parse_json(text: bytes | str, *, longest: int) -> Any:
    """The value of a JSON text, with none of the liberties that Python's parser takes.

    Args:
      text: What was read; bytes have to be UTF-8.
      longest: Characters or bytes that it may have.

    Raises:
      ValueError: It is longer, or no JSON; it nests deeper than Python follows, names a
        key twice, or holds a number that is not finite.

    Example:
      >>> parse_json('{"step": 3}', longest=100)
      {'step': 3}
    """
    if len(text) > longest:
        raise ValueError(f"{len(text):,} characters, of {longest:,}")
    try:
        return json.loads(
            text.decode() if isinstance(text, bytes) else text,
            parse_constant=_refuse,
            parse_float=_finite,
            object_pairs_hook=_unique,
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def count_of(value: Any) -> int:
    """A value that is a whole number from 0 on, and no larger than a float counts.

    Raises:
      ValueError: It is not.

    Example:
      >>> count_of(3)
      3
    """
    if type(value) is not int or not 0 <= value <= _LARGEST_COUNT:
        raise ValueError(f"{_named(value)} is no count")
    return value


def text_of(value: Any) -> str:
    """A value that is text.

    Raises:
      ValueError: It is not.
    """
    if type(value) is not str:
        raise ValueError(f"{_named(value)} is no text")
    return value


def printable(text: str, *, keep: str = "", longest: int | None = None) -> str:
    r"""Text with the code of each character that would not be seen as itself.

    Args:
      text: Any.
      keep: Characters that stay though they are not printable, such as ``"\n"``.
      longest: Cut it after so many characters; None leaves it whole.

    Example:
      >>> print(printable("\x1b[2J and \u202e"))
      \x1b[2J and \u202e
    """
    if longest is not None and len(text) > longest:
        text = f"{text[:longest]}…"
    return "".join(
        char if char.isprintable() or char in keep else ascii(char)[1:-1]
        for char in text
    )


def _named(value: Any) -> str:
    """A value in a message; of one that holds others only its kind."""
    is_plain = value is None or isinstance(value, (str, int, float))
    return repr(value)[:40] if is_plain else f"a {type(value).__name__}"


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:40]} is too large a number")
    return number


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found
