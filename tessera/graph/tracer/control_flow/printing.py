# SPDX-License-Identifier: Apache-2.0
"""``print`` of traced values: printed when the program runs.

It prints the values of the run, and in a branch only if the branch is taken. An
f-string that is an argument of ``print`` keeps its values until then.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from tessera.errors import ArgumentError
from tessera.graph.tracer.control_flow.absent_values import Unusable
from tessera.tracing import scope

_Part = str | tuple[Any, str, str]


@dataclass(frozen=True, eq=False)
class PrintedText:
    """An f-string among the arguments of ``print``.

    Attributes:
      parts: Text, and values with the conversion and the format of each.
    """

    parts: tuple[_Part, ...]


def printed_text(*parts: _Part) -> PrintedText:
    """An f-string, from its parts."""
    return PrintedText(parts)


def print_(*values: Any, **options: Any) -> None:
    """``print``, when the program runs.

    Values of several devices are gathered and printed once; in a manual region every
    device prints its own.
    """
    if scope.current() is None:  # it runs: this is code that a program calls back
        print(*map(known_text, values), **options)  # noqa: T201
        return
    texts = [
        value.parts if isinstance(value, PrintedText) else ((value, "", ""),)
        for value in values
    ]
    leaves, tree = jax.tree.flatten(texts)
    traced = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]

    def emit(*arrays: Any) -> None:
        known = list(leaves)
        for index, array in zip(traced, arrays, strict=True):
            known[index] = _plain(np.asarray(array))
        found = jax.tree.unflatten(tree, known)
        print(*("".join(map(_readable_text, each)) for each in found), **options)  # noqa: T201

    jax.debug.callback(emit, *(leaves[index] for index in traced))


def known_text(value: Any) -> Any:
    """What a function is given in place of ``print``: f-strings are text for it."""
    if not isinstance(value, PrintedText):
        return value
    return "".join(map(_formatted, value.parts))


def _formatted(part: _Part) -> str:
    if isinstance(part, str):
        return part
    value, conversion, spec = part
    if conversion:
        value = {"r": repr, "s": str, "a": ascii}[conversion](value)
    return format(value, spec)


def _readable_text(part: _Part) -> str:
    if isinstance(part, str):
        return part
    value, conversion, spec = part
    if conversion or not isinstance(value, np.generic):
        value = jax.tree.map(_readable, value)
    elif spec:  # some dtypes, such as bfloat16, have no formats of their own
        value = value.item()
    return _formatted((value, conversion, spec))


def _readable(leaf: Any) -> Any:
    """A NumPy number as the Python number that prints with as few digits."""
    if not isinstance(leaf, np.generic):
        return leaf
    kind = type(leaf.item())
    return leaf.item() if kind is bool else kind(str(leaf))


def _plain(array: np.ndarray[Any, Any]) -> Any:
    """A NumPy number instead of an array without dims."""
    return array[()] if array.ndim == 0 else array


def require_known(leaves: Iterable[Any]) -> None:
    """Refuse results that are known only when the program runs, and are no arrays.

    Args:
      leaves: The leaves of a function's result.

    Raises:
      BranchError: [T318] a variable that has no value, or none on one way.
      ArgumentError: [T301] a shape, which has no values.
    """
    for leaf in leaves:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise ArgumentError(
                "a result has no values",
                got=f"{leaf}",
                fix="return an array; eval_shape gives the shape of a result",
            )
        if isinstance(leaf, Unusable):
            leaf.read()
