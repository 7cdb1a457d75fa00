# SPDX-License-Identifier: Apache-2.0
"""Static values: what of a call's arguments a program is specialized to, by value.

Values that behave alike are one, however often they are made anew: equal dataclasses,
partials of equal parts, methods of equal objects, functions of one ``def`` or lambda
that close over equal values. Of arrays, those that a function closes over, a program
keeps the ones it met, so they are like themselves alone.
"""

import functools
from collections.abc import Hashable
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

from tessera.annotations.tensor import is_array


@dataclass(frozen=True, slots=True, eq=False)
class Static:
    """A value that a program is specialized to; ``1``, ``1.0`` and ``True`` differ.

    Attributes:
      value: The value.
      likeness: What is equal for values that are alike, and has a hash if it has one.
    """

    value: Any
    likeness: Any

    @classmethod
    def of(cls, value: Any) -> "Static":
        """A value, of which no hash is asked for yet.

        Example:
          >>> Static.of(1) == Static.of(1.0), Static.of(0.0) == Static.of(-0.0)
          (False, False)
          >>> made = [lambda x: x + 1 for _ in range(2)]
          >>> made[0] == made[1], Static.of(made[0]) == Static.of(made[1])
          (False, True)
        """
        return cls(value, _likeness(value, ()))

    def is_like(self, other: Any) -> bool:
        """Whether a program for this value serves another one."""
        return other is self.value or _likeness(other, ()) == self.likeness

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and other.likeness == self.likeness

    def __hash__(self) -> int:
        return hash(self.likeness)


@dataclass(frozen=True, slots=True, eq=False)
class _Same:
    """A value that is like itself alone; it is kept, so that no other has its id."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _likeness(value: Any, around: tuple[int, ...]) -> Hashable:
    """What values that behave alike have in common, with the type in front."""
    kind = type(value)
    if kind is float or kind is complex:
        return kind, repr(value)  # 0.0 is no -0.0, and nan is like nan
    if kind is FunctionType:
        return kind, _function(value, (*around, id(value)))
    if kind is functools.partial:
        named = sorted(value.keywords.items())
        return kind, _part(value.func, around), _parts((*value.args, *named), around)
    if kind is MethodType:
        return kind, _part(value.__func__, around), _part(value.__self__, around)
    return kind, value


def _function(value: FunctionType, around: tuple[int, ...]) -> Hashable:
    cells = []
    for cell in value.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            cells.append(_Same(cell))
    given = (value.__defaults__, value.__kwdefaults__, value.__dict__)
    code = (_Same(value.__code__), _Same(value.__globals__))
    return *code, _parts(cells, around), _parts(given, around)


def _parts(values: Any, around: tuple[int, ...]) -> Hashable:
    return tuple(_part(value, around) for value in values)


def _part(value: Any, around: tuple[int, ...]) -> Hashable:
    """The likeness of what another value is made of, which may be anything."""
    if id(value) in around:  # a function that closes over itself
        return "around", around.index(id(value))
    inside = (*around, id(value))
    kind = type(value)
    if kind is list or kind is tuple:
        return kind, _parts(value, inside)
    if kind is dict:
        return kind, _parts(value.items(), inside)
    if is_array(value):
        return _Same(value)
    likeness = _likeness(value, around)
    try:
        hash(likeness)
    except TypeError:
        return _Same(value)
    return likeness
