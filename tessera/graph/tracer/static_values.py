# SPDX-License-Identifier: Apache-2.0
"""Static values of a call: compared by value, so that equal calls share a program.

Values that behave alike are equal, even if created anew: equal dataclasses, partials of
equal parts, methods of equal objects, functions of one ``def`` or lambda that close
over equal values. Arrays that a function closes over are compared by identity, because
a program keeps them.
"""

import functools
from collections.abc import Hashable
from dataclasses import dataclass
from dis import get_instructions
from itertools import chain
from types import CodeType, FunctionType, MethodType
from typing import Any, Final

from tessera.annotations.tensor import is_array

# Types whose values cannot change, so that a value of one is equivalent to itself.
ATOMS: Final = frozenset(
    (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), type)
)

_READS: Final = ("LOAD_GLOBAL", "LOAD_NAME")


@dataclass(frozen=True, slots=True, eq=False)
class StaticArgument:
    """An argument that is declared static: a leaf, whatever tree its value is."""

    value: Any


@dataclass(frozen=True, slots=True, eq=False)
class StaticValue:
    """A value that a program is specialized to; ``1``, ``1.0`` and ``True`` differ.

    Attributes:
      value: The value.
      key: Equal for equivalent values.
      hash: The key's hash when the value was given. A value that hashes by its content
        may change in place: then it is still equal to itself, but its hash is another.
    """

    value: Any
    key: Any
    hash: int

    @classmethod
    def of(cls, value: Any) -> "StaticValue":
        """A static value.

        Raises:
          TypeError: It has no hash.

        Example:
          >>> of = StaticValue.of
          >>> of(1) == of(1.0), of(0.0) == of(-0.0)
          (False, False)
          >>> made = [lambda x: x + 1 for _ in range(2)]
          >>> made[0] == made[1], of(made[0]) == of(made[1])
          (False, True)
        """
        key = static_key(value)
        own = value.value if isinstance(value, StaticArgument) else value
        return cls(own, key, hash(key))

    @property
    def is_argument(self) -> bool:
        """Whether it is an argument that is declared static."""
        return self.key[0] is StaticArgument

    def is_equivalent(self, other: Any) -> bool:
        """Whether a program for this value is valid for another one."""
        if other is self.value and _is_constant(other):
            return True
        key = static_key(other)
        try:
            return key == self.key and hash(key) == self.hash
        except TypeError:  # it has no hash
            return False

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, StaticValue)
            and other.hash == self.hash
            and other.key == self.key
        )

    def __hash__(self) -> int:
        return self.hash


def static_key(value: Any) -> Hashable:
    """A key that equivalent static values share; hashable if the value is."""
    return _key_of(value, ())


def _is_constant(value: Any) -> bool:
    """Whether a value stays equivalent to itself, because its hash is its identity."""
    kind = type(value)
    if kind is FunctionType:
        given = value.__defaults__, value.__kwdefaults__, value.__dict__
        return not (value.__closure__ or any(given))
    by_identity = kind.__hash__ is object.__hash__ and kind is not functools.partial
    return by_identity or kind in ATOMS


@dataclass(frozen=True, slots=True, eq=False)
class _ByIdentity:
    """Compares a value by identity; keeps it alive, so that no other gets its id."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _key_of(value: Any, around: tuple[int, ...]) -> Hashable:
    """A key that equivalent values share; begins with their type."""
    kind = type(value)
    if kind is float or kind is complex:
        return kind, repr(value)  # 0.0 differs from -0.0, and nan equals nan
    if kind is FunctionType:
        return kind, _function(value, (*around, id(value)))
    if kind is functools.partial:
        named = sorted(value.keywords.items())
        return kind, _part(value.func, around), _parts((*value.args, *named), around)
    if kind is StaticArgument:
        return kind, _key_of(value.value, around)
    if kind is MethodType:
        return kind, _part(value.__func__, around), _part(value.__self__, around)
    return kind, value


def _function(value: FunctionType, around: tuple[int, ...]) -> Hashable:
    cells = []
    for cell in value.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            cells.append(_ByIdentity(cell))
    given = (value.__defaults__, value.__kwdefaults__, value.__dict__)
    code = (_ByIdentity(value.__code__), _ByIdentity(value.__globals__))
    read = tuple(
        _global(value.__globals__[name], value, around)
        for name in global_names(value.__code__)
        if name in value.__globals__
    )
    return *code, _parts(cells, around), _parts(given, around), read


def _global(found: Any, value: FunctionType, around: tuple[int, ...]) -> Hashable:
    """The key of what a function reads of its module; functions of others stay."""
    if type(found) is FunctionType and found.__globals__ is not value.__globals__:
        return _ByIdentity(found)
    return _part(found, around)


@functools.lru_cache(maxsize=1024)
def global_names(code: CodeType) -> tuple[str, ...]:
    """The names that code reads from its module."""
    own = [i.argval for i in get_instructions(code) if i.opname in _READS]
    inner = (
        global_names(each) for each in code.co_consts if isinstance(each, CodeType)
    )
    return tuple(dict.fromkeys((*own, *chain.from_iterable(inner))))


def _parts(values: Any, around: tuple[int, ...]) -> Hashable:
    return tuple(_part(value, around) for value in values)


def _part(value: Any, around: tuple[int, ...]) -> Hashable:
    """The key of a part of another value, which may be of any type."""
    if id(value) in around:  # a function that closes over itself
        return "around", around.index(id(value))
    inside = (*around, id(value))
    kind = type(value)
    if kind is list or kind is tuple:
        return kind, _parts(value, inside)
    if kind is dict:
        return kind, _parts(value.items(), inside)
    if is_array(value):
        return _ByIdentity(value)
    key = _key_of(value, around)
    try:
        hash(key)
    except TypeError:
        return _ByIdentity(value)
    return key
