# SPDX-License-Identifier: Apache-2.0
"""An optimised program as text that is equal where the programs are.

XLA's text with its names numbered as they appear, and without what says where
operations come from. Constants, layouts, donation, shardings, fusions and the schedule
stay in it. XLA's own fingerprint would not do: it is the same for other constants.
"""

import re
from collections import Counter
from typing import Any

_SOURCE = re.compile(r', metadata=\{(?:[^{}"]|"[^"]*")*\}')
_NAME = re.compile(r"%[\w.\-]+")
_SIGNATURE = re.compile(r"^(?:ENTRY )?%.*\{$", re.MULTILINE)
_PARAMETER = re.compile(r"[\w.\-]+: ")
_FIRST_COMPUTATION = re.compile(r"^(?:ENTRY )?%", re.MULTILINE)
_OPERATION = re.compile(r"^\s+(?:ROOT )?%[\w.\-]+ = (.*?) ([a-z][\w\-]*)\(")


def canonical(compiled: Any) -> str:
    """The text of a ``jax.stages.Compiled``."""
    text = compiled.as_text()
    head = re.sub(r"^HloModule [^,]+", "HloModule step", text.split("\n", 1)[0])
    # Between them are the tables of files and lines.
    first = _FIRST_COMPUTATION.search(text)
    assert first is not None, "a program has computations"
    body = _SOURCE.sub("", text[first.start() :])
    body = _SIGNATURE.sub(lambda line: _PARAMETER.sub("", line.group()), body)
    numbers: dict[str, str] = {}

    def number(match: re.Match[str]) -> str:
        return numbers.setdefault(match.group(), f"%{len(numbers)}")

    return f"{head}\n{_NAME.sub(number, body)}"


def operations(text: str) -> Counter[str]:
    """How often each operation is in a program, by its name and the shape it gives."""
    found = Counter[str]()
    for line in text.splitlines():
        if match := _OPERATION.match(line):
            shape, operation = match.groups()
            found[f"{operation} {shape}"] += 1
    return found


def differing(ours: str, theirs: str) -> dict[str, tuple[int, int]]:
    """How often each operation is in ours and in theirs, where that differs."""
    counts = operations(ours), operations(theirs)
    return {
        name: (counts[0][name], counts[1][name])
        for name in sorted(counts[0].keys() | counts[1].keys())
        if counts[0][name] != counts[1][name]
    }
