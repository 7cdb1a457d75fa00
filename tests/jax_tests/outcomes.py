# SPDX-License-Identifier: Apache-2.0
"""How a test of JAX ended: passed, or in which way it differs."""

import functools
import os
import re
import traceback
import unittest.case
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import pytest

import tessera
from tessera.errors import TesseraError

PASSING = ("passed", "skipped")
# The helpers of JAX's tests.
HELPERS = str(Path(jax.__file__).parent / "_src" / "test_util.py")
_PACKAGES = tuple(f"{Path(m.__file__).parent}{os.sep}" for m in (jax, tessera))
_EXPECTS = "the test expects "

_CALLED = r"^(function|jit|(Lowered|Traced|Compiled|Function)\.\w+)\(\) "
_OPTION = re.compile(
    _CALLED + r"(got an unexpected keyword argument '(\w+)'|takes .* positional)"
)
_ATTRIBUTE = re.compile(
    r"'(Lowered|Traced|Compiled|Function)' object has no attribute '(\w+)'"
)
_VALUES = (
    "Not equal to tolerance",
    "Mismatched elements",
    "Arrays are not",
    "not almost equal",
    "arrays are not",
    "Items in the first set",
)
_COUNTERS = re.compile(
    r"count|cache|num_compil|lowerings|misses|hits|num_trace|traces|n_calls|effects\b"
)


@dataclass(frozen=True)
class Outcome:
    """How a test ended.

    Attributes:
      kind: ``passed``, ``skipped``, or the way in which it differs. An error that is
        no assertion is a ``crash``, or ``reading`` where the test's own code raises it.
      reached: Whether the test called what is replaced.
      why: The exception's type and message.
      line: The line of the test at which it failed.
    """

    kind: str
    reached: bool
    why: str = ""
    line: str = ""

    @property
    def differs(self) -> bool:
        return self.kind not in PASSING

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, fields: dict[str, Any]) -> "Outcome":
        return cls(**fields)

    def worse_than(self, other: "Outcome") -> bool:
        """Whether this is what to say of a test of which the other is true as well."""
        if self.differs or other.differs:
            return self.differs and not other.differs
        return (self.kind, self.reached) > (other.kind, other.reached)


def outcome_of(report: Any, call: pytest.CallInfo[None], reached: bool) -> Outcome:
    """The outcome of one phase of a test."""
    if not report.failed:
        return Outcome("skipped" if report.skipped else "passed", reached)
    assert call.excinfo is not None
    error = call.excinfo.value
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename.endswith(report.nodeid.partition("::")[0])
    ]
    line = (frames[-1].line or "") if frames else ""
    notes = [
        f"{note}\n" for note in getattr(error, "__notes__", []) if _EXPECTS in note
    ]
    why = "".join([*notes, f"{type(error).__name__}: {error}"[:1500]])
    kind = "message" if notes else _kind(error, line)
    if kind == "crash" and _is_of_test(error):
        kind = "reading"
    return Outcome(kind, reached, why, line)


def note_expected_errors(patch: pytest.MonkeyPatch) -> None:
    """Have ``assertRaises`` say in an error that it expects another one."""
    context: Any = unittest.case._AssertRaisesContext
    real = context.__exit__

    @functools.wraps(real)
    def leave(self: Any, kind: Any, error: Any, trace: Any) -> Any:
        if error is not None and not issubclass(kind, self.expected):
            expected = self.expected
            expected = expected if isinstance(expected, tuple) else (expected,)
            error.add_note(_EXPECTS + ", ".join(one.__name__ for one in expected))
        return real(self, kind, error, trace)

    patch.setattr(context, "__exit__", leave)


def _is_of_test(error: BaseException) -> bool:
    """Whether no call of Tessera or JAX raised it, but the code of the test itself.

    Such a test reads a result or a jaxpr, and finds it to be another than JAX's.
    """
    if type(error).__module__.startswith("jax"):
        return False  # of a program that runs, which has no frames
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return not any(f.startswith(_PACKAGES) and f != HELPERS for f in files)


def _kind(error: BaseException, line: str) -> str:
    text = str(error)
    if isinstance(error, TesseraError):
        return f"refused {error.code}"
    if isinstance(error, TypeError) and (match := _OPTION.search(text)):
        return f"option {match[4] or 'by position'}"
    if isinstance(error, AttributeError) and (match := _ATTRIBUTE.search(text)):
        return f"attribute {match[1]}.{match[2]}"
    if not isinstance(error, AssertionError):
        return "crash"
    if any(words in text for words in _VALUES):
        return "value"
    if "not raised" in text:
        return "not raised"
    if "does not match" in text or "assertRaises" in line:
        return "message"
    if _COUNTERS.search(line):
        return "counter"
    return "assertion"
