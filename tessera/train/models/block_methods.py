# SPDX-License-Identifier: Apache-2.0
"""The methods of a model whose blocks repeat: ``embed``, ``block`` and ``head``.

Each takes by name what it reads of a batch: ``embed(self, tokens)``,
``block(self, block, hidden, segment_ids)``, ``head(self, hidden)``. A block may also
take ``index``, its number, an int32 scalar. Functions have ``config, params`` in the
place of ``self``.
"""

import inspect
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from jaxtyping import Array

from tessera.errors import ModelDefinitionError

METHODS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"embed": (), "block": ("block", "hidden"), "head": ("hidden",)}
)
"""The methods, and their positional arguments after ``self``."""

INDEX: Final = "index"


def check_methods(target: Any, inputs: Sequence[str], owner: tuple[str, ...]) -> None:
    """Check that a class has the methods, and that they read all inputs.

    Args:
      target: The class.
      inputs: What the model declares that it reads.
      owner: What comes first: ``self``, or ``config`` and ``params``.

    Raises:
      ModelDefinitionError: [T407] one is missing, or takes something else.
    """
    read: set[str] = set()
    for name, arguments in METHODS.items():
        known = {*inputs, INDEX} if name == "block" else {*inputs}
        first = (*owner, *arguments)
        method = getattr(target, name, None)
        parameters = () if method is None else (*_parameters(method).values(),)
        positional, rest = parameters[: len(first)], parameters[len(first) :]
        named = {each.name for each in rest if each.kind != each.VAR_KEYWORD}
        is_whole = len(positional) == len(first) and all(
            each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
            for each in positional
        )
        if not is_whole or not named <= known:
            raise ModelDefinitionError(
                f"{target.__name__} has no method {name} that Tessera can call",
                got=f"{name}{inspect.signature(method)}" if method else "there is none",
                fix=f"define {name}({', '.join(first)}, ...), which may take of "
                f"{', '.join(sorted(known))} what it reads, by these names",
            )
        read |= {*inputs} if len(named) < len(rest) else named
    if unread := [name for name in inputs if name not in read]:
        raise ModelDefinitionError(
            f"no method of {target.__name__} reads some of its inputs",
            got=f"inputs={tuple(inputs)}: {', '.join(unread)}",
            fix="declare those that it reads: "
            f"inputs={tuple(name for name in inputs if name in read)}",
        )


def call(method: Any, available: Mapping[str, Array], *arguments: Any) -> Array:
    """Call a method with what it reads."""
    parameters = [*_parameters(method).values()][len(arguments) :]
    if any(each.kind == each.VAR_KEYWORD for each in parameters):
        return method(*arguments, **available)
    named = {each.name for each in parameters}
    chosen = {name: array for name, array in available.items() if name in named}
    return method(*arguments, **chosen)


def _parameters(method: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(method).parameters
