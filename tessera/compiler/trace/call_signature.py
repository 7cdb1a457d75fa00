# SPDX-License-Identifier: Apache-2.0
"""How a call is written: by position or keyword, with defaults left out or given.

Calls that mean the same are one call: ``f(x)``, ``f(x=x)`` and ``f(x, k=default)``.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from tessera.annotations import bind_call
from tessera.annotations.tensor import is_array
from tessera.compiler.trace.arguments import Call, StaleProgram


class Form:
    """The one form that all ways to write a call of a function have in common.

    Defaults are filled in where they are static; one that holds arrays is closed over
    by the function, as it is without Tessera.

    Args:
      signature: Of the function.
      name: What messages call the function.
    """

    def __init__(self, signature: inspect.Signature, name: str) -> None:
        self.signature, self._name = signature, name
        self._defaults = {
            name: parameter.default
            for name, parameter in signature.parameters.items()
            if parameter.default is not parameter.empty
            and _is_static(parameter.default)
        }

    def of(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments by position as far as they can be, the others by keyword.

        Raises:
          ArgumentError: [T301] the function does not take these arguments.

        Example:
          >>> def scaled(x, factor=2, *, bias=None): ...
          >>> Form(inspect.signature(scaled), "scaled").of((1,), {})
          ((1, 2), {'bias': None})
        """
        bound = bind_call(self.signature, args, kwargs, name=self._name)
        bound.arguments = self._defaults | bound.arguments
        return bound.args, bound.kwargs

    def values(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The same, keywords in their alphabet's order, in one list."""
        ordered, named = self.of(args, kwargs)
        return [*ordered, *(named[name] for name in sorted(named))]

    def spelling(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> "Spelling":
        """How these arguments are written, whatever they are."""
        names = tuple(kwargs)
        slots = {name: _Slot(len(args) + i) for i, name in enumerate(names)}
        ordered, named = self.of([_Slot(i) for i in range(len(args))], slots)
        values = [*ordered, *(named[name] for name in sorted(named))]
        count = len(args) + len(names)
        defaults = [value for value in values if not isinstance(value, _Slot)]
        rest = iter(range(count, count + len(defaults)))
        places = [v.place if isinstance(v, _Slot) else next(rest) for v in values]
        is_plain = places == list(range(len(values)))
        return Spelling(
            len(args),
            names,
            frozenset(names),
            tuple(defaults),
            None if is_plain else tuple(places),
        )


@dataclass(frozen=True, slots=True)
class _Slot:
    """Stands for the argument that is written at a place."""

    place: int


@dataclass(frozen=True, slots=True)
class Spelling:
    """One way to write a call.

    Attributes:
      positional: How many arguments are written by position.
      names: The keywords, in some order.
      keywords: The same as a set.
      defaults: Values of what is left out.
      places: Which of them, one after the other, each argument of the call's form is;
        None where that is their order.
    """

    positional: int
    names: tuple[str, ...]
    keywords: frozenset[str]
    defaults: tuple[Any, ...]
    places: tuple[int, ...] | None

    def parts(
        self, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Any]:
        """What the program of a call takes for arguments that are written this way.

        Raises:
          StaleProgram: They are written another way, or do not fit the program.
        """
        if len(args) != self.positional or kwargs.keys() != self.keywords:
            raise StaleProgram
        values = self.values(args, kwargs)
        return [
            argument.dynamic_part(value)
            for argument, value in zip(call.arguments, values, strict=True)
        ]

    def values(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
        """The arguments in the order of the call's form."""
        values = (*args, *[kwargs[name] for name in self.names], *self.defaults)
        if self.places is None:
            return values
        return [values[place] for place in self.places]


def _is_static(default: Any) -> bool:
    """Whether a default holds no arrays and can be part of a program."""
    for leaf in jax.tree.leaves(default):
        try:
            hash(leaf)
        except TypeError:
            return False
        if is_array(leaf):
            return False
    return True
