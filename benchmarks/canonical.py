# SPDX-License-Identifier: Apache-2.0
"""An optimised program as text that is equal where the programs are.

XLA's canonical printing numbers instructions in order and leaves out where they come
from. What is left of names, those of the module and of computations, is numbered here.
Constants, layouts, donation, shardings and the schedule stay in the text. JAX has no
public way to print so, and XLA's own fingerprint is the same for other constants.
"""

import re
from collections import Counter
from typing import Any

from jaxlib import _hlo  # noqa: TID251 - printing options are nowhere else

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) (?:\([^\n]*)?\{$", re.MULTILINE)
_OPERATION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ([a-z][\w\-]*)\(")


def canonical(compiled: Any) -> str:
    """The text of a ``jax.stages.Compiled``."""
    options = _hlo.HloPrintOptions.canonical()
    options.print_metadata = False
    (module,) = compiled.runtime_executable().hlo_modules()
    text = re.sub(r"^HloModule [^,]+,", "HloModule step,", module.to_string(options))
    numbers = {name: f"c{i}" for i, name in enumerate(_COMPUTATION.findall(text))}
    return re.sub(
        r"[\w.\-]+", lambda word: numbers.get(word.group(), word.group()), text
    )


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
