# SPDX-License-Identifier: Apache-2.0
"""What can hold a value: dicts, lists, objects, cells of closures, global variables.

A branch or a loop's body is traced by running it, so whatever its code changes has to
be found and undone. A ``Holder`` is one thing whose content can be read, compared and
put back, entry by entry. The elements of a set and the position of an iterator or of a
random generator are one entry each, which can be compared but cannot be traced.
"""

import collections
import gc
import itertools
import pickle
import random
from collections.abc import Mapping
from dataclasses import dataclass
from types import CellType, GeneratorType, ModuleType
from typing import Any, Final

import numpy as np

# The one entry of a holder that has no entries of its own.
WHOLE: Final = "<content>"

# Iterators whose position shows neither in a length nor in what they refer to.
_OPAQUE_ITERATORS = (
    itertools.cycle,
    itertools.product,
    itertools.permutations,
    itertools.combinations,
    itertools.combinations_with_replacement,
    itertools.groupby,
    itertools.zip_longest,
    type(itertools.tee(())[0]),
)
_RANDOM = (random.Random, np.random.Generator, np.random.RandomState)


@dataclass(frozen=True, eq=False)
class Holder:
    """One thing that holds values.

    Attributes:
      thing: It.
      path: What messages call it, as ``state['inner']``.
      outside: Whether it outlives the trace, as global variables do. What a program
        computes must not be left in it.
    """

    thing: Any
    path: str
    outside: bool

    def content(self) -> dict[Any, Any]:
        """What it holds now, by entry."""
        return self._content()

    def fill(self, content: Mapping[Any, Any]) -> None:
        """Make it hold just this; what holds it already is left alone."""
        if differences(self._content(), content):
            self._fill(content)

    def entry_name(self, entry: Any) -> str:
        """What messages call one of its entries."""
        return self._entry_name(entry)

    def _content(self) -> dict[Any, Any]:
        raise NotImplementedError

    def _fill(self, content: Mapping[Any, Any]) -> None:
        raise NotImplementedError

    def _entry_name(self, entry: Any) -> str:
        del entry
        return self.path


class Entries(Holder):
    """A dict."""

    def _content(self) -> dict[Any, Any]:
        return dict(dict.items(self.thing))

    def _fill(self, content: Mapping[Any, Any]) -> None:
        for entry in dict.keys(self.thing) - content.keys():
            dict.__delitem__(self.thing, entry)
        dict.update(self.thing, content)

    def _entry_name(self, entry: Any) -> str:
        return f"{self.path}[{entry!r}]"


class Items(Holder):
    """A list, or a deque."""

    def _content(self) -> dict[Any, Any]:
        return dict(enumerate(self.thing))

    def _fill(self, content: Mapping[Any, Any]) -> None:
        self.thing.clear()
        self.thing.extend(content[i] for i in sorted(content))

    def _entry_name(self, entry: Any) -> str:
        return f"{self.path}[{entry!r}]"


class Cell(Holder):
    """A variable that functions close over."""

    def _content(self) -> dict[Any, Any]:
        try:
            return {WHOLE: self.thing.cell_contents}
        except ValueError:  # not assigned yet
            return {}

    def _fill(self, content: Mapping[Any, Any]) -> None:
        if content:
            self.thing.cell_contents = content[WHOLE]
        else:
            del self.thing.cell_contents


@dataclass(frozen=True, eq=False)
class Attributes(Holder):
    """An object, a class or a module.

    Attributes:
      names: The attributes that the code in question can name; None for all.
    """

    names: frozenset[str] | None = None

    def _content(self) -> dict[Any, Any]:
        held = vars(self.thing) if hasattr(self.thing, "__dict__") else {}
        found = {name: value for name, value in held.items() if self._is_named(name)}
        if not isinstance(self.thing, (type, ModuleType)):
            for name in filter(self._is_named, slots(type(self.thing))):
                try:
                    found[name] = object.__getattribute__(self.thing, name)
                except AttributeError:  # not assigned yet
                    continue
        return found

    def _fill(self, content: Mapping[Any, Any]) -> None:
        owner = type if isinstance(self.thing, type) else object
        now = self._content()
        for name in now.keys() - content.keys():
            owner.__delattr__(self.thing, name)
        for name, value in content.items():
            if name not in now or now[name] is not value:
                owner.__setattr__(self.thing, name, value)

    def _entry_name(self, entry: Any) -> str:
        return f"{self.path}.{entry}"

    def _is_named(self, name: str) -> bool:
        return self.names is None or name in self.names


@dataclass(frozen=True, eq=False)
class Globals(Holder):
    """The global variables of a module's functions, those that code can name."""

    names: frozenset[str]

    def _content(self) -> dict[Any, Any]:
        return {name: self.thing[name] for name in self.names & self.thing.keys()}

    def _fill(self, content: Mapping[Any, Any]) -> None:
        for name in (self.names & self.thing.keys()) - content.keys():
            del self.thing[name]
        self.thing.update(content)

    def _entry_name(self, entry: Any) -> str:
        return str(entry)


@dataclass(frozen=True)
class Snapshot:
    """All of a holder's content as one value, which is compared by ``==``."""

    value: Any


class Elements(Holder):
    """A set, or an array of bytes."""

    def _content(self) -> dict[Any, Any]:
        kind = frozenset if isinstance(self.thing, set) else bytes
        return {WHOLE: Snapshot(kind(self.thing))}

    def _fill(self, content: Mapping[Any, Any]) -> None:
        self.thing.clear()
        add = self.thing.update if isinstance(self.thing, set) else self.thing.extend
        add(content[WHOLE].value)


class Numbers(Holder):
    """A NumPy array that is small enough to be compared each time."""

    def _content(self) -> dict[Any, Any]:
        return {WHOLE: Snapshot(_Copy(self.thing))}

    def _fill(self, content: Mapping[Any, Any]) -> None:
        self.thing[...] = content[WHOLE].value.array


class _Copy:
    """A copy of an array, which equals one of the same bytes."""

    def __init__(self, array: Any) -> None:
        self.array = array.copy()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Copy) and self._bytes() == other._bytes()

    def _bytes(self) -> bytes:
        return self.array.tobytes()

    __hash__ = None  # type: ignore[assignment]


class Position(Holder):
    """An iterator or a random generator: code that uses it moves it on."""

    def _content(self) -> dict[Any, Any]:
        return {WHOLE: Snapshot(_position(self.thing))}

    def _fill(self, content: Mapping[Any, Any]) -> None:
        # Nothing can put back an iterator.
        if isinstance(self.thing, _RANDOM):
            _set_state(self.thing, pickle.loads(content[WHOLE].value))


def holder_of(thing: Any, path: str, outside: bool) -> Holder:
    """The holder for a container, a cell, an iterator, or else an object."""
    if isinstance(thing, dict):
        return Entries(thing, path, outside)
    if isinstance(thing, (list, collections.deque)):
        return Items(thing, path, outside)
    if isinstance(thing, (set, bytearray)):
        return Elements(thing, path, outside)
    if isinstance(thing, CellType):
        return Cell(thing, path, outside)
    if isinstance(thing, np.ndarray):
        return Numbers(thing, path, outside)
    if is_random_generator(thing) or is_iterator(thing):
        return Position(thing, path, outside)
    return Attributes(thing, path, outside)


def differences(
    before: Mapping[Any, Any], after: Mapping[Any, Any], absent: Any = None
) -> dict[Any, Any]:
    """Entries of ``after`` that have another value, and ``absent`` for those that went.

    Values are compared by identity, snapshots by what they hold.

    Example:
      >>> differences({"a": 1, "b": 2}, {"a": 1, "c": 3})
      {'c': 3, 'b': None}
    """
    missing = object()
    found = {
        key: value
        for key, value in after.items()
        if (was := before.get(key, missing)) is not value
        and not (isinstance(was, Snapshot) and was == value)
    }
    return found | {key: absent for key in before if key not in after}


def slots(kind: type) -> list[str]:
    """The attributes that objects of a class have besides those in ``__dict__``."""
    found: list[str] = []
    for base in kind.__mro__:
        names = vars(base).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            hidden = name.startswith("__") and not name.endswith("__")
            found.append(f"_{base.__name__.lstrip('_')}{name}" if hidden else name)
    return [name for name in found if name not in ("__dict__", "__weakref__")]


# --- iterators and random generators


def is_random_generator(value: Any) -> bool:
    """Whether a value is a random generator of Python or of NumPy."""
    return isinstance(value, _RANDOM)


def is_iterator(value: Any) -> bool:
    """Whether a value is used up by going over it, as what ``iter`` gives is.

    An object of a user's own class holds its position in attributes.
    """
    kind = type(value)
    return hasattr(kind, "__next__") and not hasattr(value, "__dict__")


def _position(thing: Any) -> Any:
    """Something that differs where an iterator or a random generator has moved on."""
    if isinstance(thing, _RANDOM):
        return pickle.dumps(_state(thing))
    if isinstance(thing, _OPAQUE_ITERATORS):
        return object()  # it differs from itself, so code that can reach it is refused
    if isinstance(thing, itertools.count):
        return repr(thing)
    parts: list[Any] = []
    if isinstance(thing, GeneratorType):
        parts.append(None if thing.gi_frame is None else thing.gi_frame.f_lasti)
    elif hasattr(thing, "__length_hint__"):
        parts.append(thing.__length_hint__())
    for part in gc.get_referents(thing):
        inner = part if isinstance(thing, (zip, map)) and type(part) is tuple else ()
        parts += [_position(each) for each in (part, *inner) if is_iterator(each)]
        parts.append(_Same(part))
    return parts


class _Same:
    """A value that equals nothing but itself."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._value is self._value

    __hash__ = None  # type: ignore[assignment]


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
