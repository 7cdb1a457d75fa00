# SPDX-License-Identifier: Apache-2.0
"""The base class of all errors: a code, the problem, the values and the fix."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import ClassVar, Final

SITE: Final = "https://tessera-spmd.github.io/tessera"
"""Where the documentation is; ``tessera explain`` prints an error's page without it."""


class TesseraError(Exception):
    """A user error; the base class of every coded error.

    Args:
      what: One sentence: which argument, and the problem with it.
      got: The offending values, with the arithmetic that fails.
      fix: What to write instead, with the nearest legal values.

    Example:
      >>> from tessera.errors import NoMeshError
      >>> raise NoMeshError("there is no mesh here", fix="open one with 'with mesh:'")
      Traceback (most recent call last):
      ...
      tessera.errors.NoMeshError: [T106] there is no mesh here
        fix: open one with 'with mesh:'
        docs: https://tessera-spmd.github.io/tessera/errors/T106.html
    """

    code: ClassVar[str] = "T000"
    exit_code: ClassVar[int] = 2
    """Exit code of a program that it ends; see docs/guides/reliability.md."""

    def __init_subclass__(cls) -> None:
        if cls.__module__.startswith("tessera.errors."):
            cls.__module__ = "tessera.errors"  # as users import it, and see it

    def __init__(self, what: str, *, got: str = "", fix: str = "") -> None:
        # Names of files, keys and tensors may have bytes that are not UTF-8, and escape
        # sequences that a terminal would obey.
        self.what = printable(what)
        self.got, self.fix = (printable(text, keep="\n") for text in (got, fix))
        lines = [f"[{self.code}] {self.what}"]
        lines += [f"  got: {line}" for line in self.got.split("\n") if line]
        lines += [f"  fix: {line}" for line in self.fix.split("\n") if line]
        lines += [f"  docs: {SITE}/errors/{self.code}.html"]
        super().__init__("\n".join(lines))


class TesseraWarning(UserWarning):
    """Something legal that is probably unintended."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text, keep="\n"))


def printable(text: str, *, keep: str = "", longest: int | None = None) -> str:
    r"""Escape the characters of a text that are not printable.

    Args:
      text: Any text.
      keep: Unprintable characters to leave as they are, such as ``"\n"``.
      longest: Truncate it to so many characters; None does not.

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


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """A spelling suggestion for the end of a ``fix`` line.

    Example:
      >>> did_you_mean("fdsp", ["fsdp", "tp"])
      "did you mean 'fsdp'? Known: 'fsdp', 'tp'"
    """
    names = list(names)
    close = get_close_matches(name, names, n=1)
    listed = ", ".join(repr(item) for item in names) or "none"
    return (f"did you mean {close[0]!r}? " if close else "") + f"Known: {listed}"


def nearest(legal: Iterable[int], value: int) -> str:
    """The legal numbers on both sides of an illegal one, for a message.

    Example:
      >>> nearest([1, 2, 4], 3)
      '2 or 4'
    """
    numbers = list(legal)
    below = [n for n in numbers if n < value][-1:]
    above = [n for n in numbers if n > value][:1]
    return " or ".join(map(str, below + above))


def nearest_multiples(factor: int, value: int) -> str:
    """The multiples on both sides of a number that is none, for a message.

    Example:
      >>> nearest_multiples(4, 3), nearest_multiples(4, 9)
      ('4', '8 or 12')
    """
    below = value // factor * factor
    return nearest((n for n in (below, below + factor) if n), value)
