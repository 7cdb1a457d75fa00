# SPDX-License-Identifier: Apache-2.0
"""Logical names for the dims of parameters, by a table of patterns.

    {
        "embed/embedding": "vocab embed",
        "layers/*/query/kernel": "embed heads",
        "*/scale": "norm",
    }

A pattern matches the whole name of a parameter as ``fnmatch`` does: ``*`` stands for
any text, slashes included. The first pattern that matches decides. A value has one
name for each dim, of the table ``RULES``; ``-`` is a dim that is never sharded.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Final

from tessera.errors import DimTableError, did_you_mean
from tessera.train.models.axis_rules import RULES

WHOLE: Final = "-"


def dim_names(
    table: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[str | None, ...]]:
    """The logical names of every parameter's dims; None for a dim that stays whole.

    Args:
      table: Patterns and their names.
      shapes: The shape of each parameter, by its name.

    Raises:
      DimTableError: [T408] a parameter has no pattern, or a pattern no parameter; a
        name is unknown, or there is not one for each dim. Lists all of them.

    Example:
      >>> dim_names({"*/kernel": "embed -"}, {"up/kernel": (4, 8)})
      {'up/kernel': ('embed', None)}
    """
    result: dict[str, tuple[str | None, ...]] = {}
    used: set[str] = set()
    problems: list[tuple[str, str]] = []
    for name, shape in shapes.items():
        pattern = next((p for p in table if fnmatchcase(name, p)), None)
        if pattern is None:
            problems.append((f"{name}{[*shape]}: no pattern matches", f"add {name!r}"))
            continue
        used.add(pattern)
        words = table[pattern].split()
        if len(words) != len(shape):
            got = f"{name}{[*shape]}: {pattern!r} has {len(words)} names"
            problems.append((got, f"give {pattern!r} {len(shape)} names"))
        result[name] = tuple(None if word == WHOLE else word for word in words)
    for pattern, value in table.items():
        if pattern not in used:
            fix = did_you_mean(pattern, shapes) if len(shapes) < 20 else "remove it"
            problems.append((f"{pattern!r} matches no parameter", fix))
        for word in value.split():
            if word not in RULES and word != WHOLE:
                got = f"{pattern!r}: there is no dim {word!r}"
                problems.append((got, did_you_mean(word, [*RULES, WHOLE])))
    if problems:
        raise DimTableError(
            "the table of dims does not describe the model's parameters",
            got="\n".join(got for got, _ in problems),
            fix="\n".join(dict.fromkeys(fix for _, fix in problems)),
        )
    return result
