# SPDX-License-Identifier: Apache-2.0
"""Normalizes calls by their signature, so that equal calls share one program.

``f(x)``, ``f(x=x)`` and ``f(x, k=default)`` are one call.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import jax

from tessera.annotations import bind_call
from tessera.annotations.tensor import is_array
from tessera.compiler.trace.arguments import Call, ProgramMismatch, flatten_args
from tessera.compiler.trace.static_values import ATOMS, StaticValue

# Stands for the value of a static leaf that may change in place.
_NEVER: Final = object()

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
            tuple(kwargs),
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
      names: The keywords, in some order.
      defaults: Values of the arguments that are left out.
      order: For each argument in normal form its index among the positional, keyword
        and default ones; None where the order is the same.
    """

    names: tuple[str, ...]
    defaults: tuple[Any, ...]
    order: tuple[int, ...] | None

    def leaf_roles(self, call: Call, tree: Any) -> "LeafRoles":
        """What the program of a call does with the leaves of such calls.

        Args:
          call: A call in this pattern.
          tree: The tree of its ``(args, kwargs)``.
        """
        args, kwargs = (list(part.children()) for part in tree.children())
        ends = list(accumulate(part.num_leaves for part in (*args, *kwargs)))
        slices = list(map(range, (0, *ends), ends))
        named = dict(zip(sorted(self.names), slices[len(args) :], strict=True))
        arrays: list[int] = []
        statics: list[tuple[int, Any, StaticValue]] = []
        values = self.values(slices[: len(args)], named)
        for indices, argument in zip(values, call.arguments, strict=True):
            if not isinstance(indices, range):
                continue  # A default: static, and the same in all calls of the pattern.
            fixed = {indices[index]: static for index, static in argument.statics}
            arrays += [index for index in indices if index not in fixed]
            for index, static in fixed.items():
                is_atom = type(static.value) in ATOMS
                statics.append((index, static.value if is_atom else _NEVER, static))
        all_arrays = arrays == list(range(tree.num_leaves))
        return LeafRoles(tuple(statics), None if all_arrays else _slices(arrays))

    def values(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
        """The arguments in the order of the normal form."""
        values = (*args, *[kwargs[name] for name in self.names], *self.defaults)
        return values if self.order is None else [values[i] for i in self.order]


@dataclass(frozen=True, slots=True)
class LeafRoles:
    """Which leaves of a call are the arrays of its program, and which are static.

    Attributes:
      statics: For each static leaf its index; the value, if being this value suffices;
        and the static value.
      arrays: Where the arrays are, in the program's order; None if these are all
        leaves, in order.
    """

    statics: tuple[tuple[int, Any, StaticValue], ...]
    arrays: tuple[slice, ...] | None

    def check(self, leaves: Sequence[Any]) -> None:
        """Raise ``ProgramMismatch`` if the static leaves have other values."""
        for index, value, static in self.statics:
            found = leaves[index]
            if found is not value and not static.is_equivalent(found):
                raise ProgramMismatch

    def arrays_of(self, leaves: list[Any]) -> list[Any]:
        """The arrays among the leaves of a call, as the program takes them."""
        if self.arrays is None:
            return leaves
        if len(self.arrays) == 1:
            return leaves[self.arrays[0]]
        return [leaf for indices in self.arrays for leaf in leaves[indices]]


def _slices(indices: Sequence[int]) -> tuple[slice, ...]:
    """Some indices as slices of neighbors.

    Example:
      >>> _slices([3, 4, 5, 0, 2])
      (slice(3, 6, None), slice(0, 1, None), slice(2, 3, None))
    """
    found: list[slice] = []
    for index in indices:
        if found and found[-1].stop == index:
            found[-1] = slice(found[-1].start, index + 1)
        else:
            found.append(slice(index, index + 1))
    return tuple(found)


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
