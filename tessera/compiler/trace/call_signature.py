# SPDX-License-Identifier: Apache-2.0
"""Normalizes calls by their signature, so that equal calls share one program.

``f(x)``, ``f(x=x)`` and ``f(x, k=default)`` are one call.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from tessera.annotations import bind_call
from tessera.annotations.tensor import is_array
from tessera.compiler.trace.arguments import Call, ProgramMismatch, flatten_args

_PLAIN = inspect.Parameter.POSITIONAL_OR_KEYWORD


class CallSignature:
    """A function's signature, which gives every call its normal form.

    In normal form, arguments are positional as far as they can be, and defaults are
    filled in where they are static. A default that holds arrays is closed over by the
    function, as it is without Tessera.

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
        kinds = (inspect.Parameter.POSITIONAL_ONLY, _PLAIN)
        self._positional = [
            name for name, p in signature.parameters.items() if p.kind in kinds
        ]

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """The call in normal form, its arguments flattened.

        Raises:
          ArgumentError: [T301] the function does not take these arguments, or one is
            neither an array nor hashable.
        """
        return flatten_args(self._positional, *self.normalize(args, kwargs))

    def normalize(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and the keyword arguments in normal form.

        Raises:
          ArgumentError: [T301] the function does not take these arguments.

        Example:
          >>> def scaled(x, factor=2, *, bias=None): ...
          >>> CallSignature(inspect.signature(scaled), "scaled").normalize((1,), {})
          ((1, 2), {'bias': None})
        """
        bound = bind_call(self.signature, args, kwargs, name=self._name)
        bound.arguments = self._defaults | bound.arguments
        return bound.args, bound.kwargs

    def values(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The normalized arguments in one list, keyword arguments sorted by name."""
        positional, named = self.normalize(args, kwargs)
        return [*positional, *(named[name] for name in sorted(named))]

    def pattern(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> "CallPattern":
        """How this call passes its arguments, whatever their values are."""
        slots = [_Slot(i) for i in range(len(args) + len(kwargs))]
        named = dict(zip(kwargs, slots[len(args) :], strict=True))
        values = self.values(slots[: len(args)], named)
        defaults = [value for value in values if not isinstance(value, _Slot)]
        rest = iter(range(len(slots), len(values)))
        order = [v.index if isinstance(v, _Slot) else next(rest) for v in values]
        return CallPattern(
            len(args),
            tuple(kwargs),
            frozenset(kwargs),
            tuple(defaults),
            None if order == list(range(len(values))) else tuple(order),
        )


@dataclass(frozen=True, slots=True)
class _Slot:
    """Stands for the argument at one position of a call."""

    index: int


@dataclass(frozen=True, slots=True)
class CallPattern:
    """One way to pass a function's arguments: by position, by keyword, by default.

    Attributes:
      positional: How many arguments are positional.
      names: The keywords, in some order.
      keywords: The same as a set.
      defaults: Values of the arguments that are left out.
      order: For each argument in normal form its index among the positional, keyword
        and default ones; None where the order is the same.
    """

    positional: int
    names: tuple[str, ...]
    keywords: frozenset[str]
    defaults: tuple[Any, ...]
    order: tuple[int, ...] | None

    def parts(
        self, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Any]:
        """What the program of a call takes for arguments in this pattern.

        Raises:
          ProgramMismatch: They are in another pattern, or do not fit the program.
        """
        if len(args) != self.positional or kwargs.keys() != self.keywords:
            raise ProgramMismatch
        values = self.values(args, kwargs)
        return [
            argument.dynamic_part(value)
            for argument, value in zip(call.arguments, values, strict=True)
        ]

    def values(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
        """The arguments in the order of the normal form."""
        values = (*args, *[kwargs[name] for name in self.names], *self.defaults)
        return values if self.order is None else [values[i] for i in self.order]


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
