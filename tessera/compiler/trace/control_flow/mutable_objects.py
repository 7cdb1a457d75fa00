# SPDX-License-Identifier: Apache-2.0
"""Objects whose content code can change: dicts, lists, attributes, closures, globals.

A branch or a loop's body is traced by running it, so whatever its code changes has to
be found and undone. A ``MutableObject`` has content that can be read, compared and
restored, entry by entry. The elements of a set and the position of an iterator or of a
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

# The one entry of an object that has no entries of its own.
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
class MutableObject:
    """One object with content that code can change.

    Attributes:
      target: The object itself.
      path: Its name in messages, as ``state['inner']``.
      outside: Whether it outlives the trace, as global variables do. What a program
        computes must not be left in it.
    """

    target: Any
    path: str
    outside: bool

    def content(self) -> dict[Any, Any]:
        """The present content, by entry."""
        return self._content()

    def fill(self, content: Mapping[Any, Any]) -> None:
        """Restore this content; entries that are equal already are left alone."""
        if differences(self._content(), content):
            self._fill(content)

    def entry_name(self, entry: Any) -> str:
        """The name of an entry in messages."""
        return self._entry_name(entry)

    def _content(self) -> dict[Any, Any]:
        raise NotImplementedError

    def _fill(self, content: Mapping[Any, Any]) -> None:
        raise NotImplementedError

    def _entry_name(self, entry: Any) -> str:
        del entry
        return self.path


class DictEntries(MutableObject):
    """A dict."""

    def _content(self) -> dict[Any, Any]:
        return dict(dict.items(self.target))

    def _fill(self, content: Mapping[Any, Any]) -> None:
        for entry in dict.keys(self.target) - content.keys():
            dict.__delitem__(self.target, entry)
        dict.update(self.target, content)

    def _entry_name(self, entry: Any) -> str:
        return f"{self.path}[{entry!r}]"


class ListItems(MutableObject):
    """A list, or a deque."""

    def _content(self) -> dict[Any, Any]:
        return dict(enumerate(self.target))

    def _fill(self, content: Mapping[Any, Any]) -> None:
        self.target.clear()
        self.target.extend(content[i] for i in sorted(content))

    def _entry_name(self, entry: Any) -> str:
        return f"{self.path}[{entry!r}]"


class ClosureCell(MutableObject):
    """A variable that functions close over."""

    def _content(self) -> dict[Any, Any]:
        try:
            return {WHOLE: self.target.cell_contents}
        except ValueError:  # not assigned yet
            return {}

    def _fill(self, content: Mapping[Any, Any]) -> None:
        if content:
            self.target.cell_contents = content[WHOLE]
        else:
            del self.target.cell_contents


@dataclass(frozen=True, eq=False)
class Attributes(MutableObject):
    """An object, a class or a module.

    Attributes:
      names: The attributes that the code in question can name; None for all.
    """

    names: frozenset[str] | None = None

    def _content(self) -> dict[Any, Any]:
        attributes = vars(self.target) if hasattr(self.target, "__dict__") else {}
        found = {
            name: value for name, value in attributes.items() if self._is_named(name)
        }
        if not isinstance(self.target, (type, ModuleType)):
            for name in filter(self._is_named, slots(type(self.target))):
                try:
                    found[name] = object.__getattribute__(self.target, name)
                except AttributeError:  # not assigned yet
                    continue
        return found

    def _fill(self, content: Mapping[Any, Any]) -> None:
        owner = type if isinstance(self.target, type) else object
        now = self._content()
        for name in now.keys() - content.keys():
            owner.__delattr__(self.target, name)
        for name, value in content.items():
            if name not in now or now[name] is not value:
                owner.__setattr__(self.target, name, value)

    def _entry_name(self, entry: Any) -> str:
        return f"{self.path}.{entry}"

    def _is_named(self, name: str) -> bool:
        return self.names is None or name in self.names


@dataclass(frozen=True, eq=False)
class GlobalVariables(MutableObject):
    """The global variables of a module's functions, those that code can name."""

    names: frozenset[str]

    def _content(self) -> dict[Any, Any]:
        return {name: self.target[name] for name in self.names & self.target.keys()}

    def _fill(self, content: Mapping[Any, Any]) -> None:
        for name in (self.names & self.target.keys()) - content.keys():
            del self.target[name]
        self.target.update(content)

    def _entry_name(self, entry: Any) -> str:
        return str(entry)


@dataclass(frozen=True)
class Snapshot:
    """All content of an object as one value, which is compared by ``==``."""

    value: Any


class SetElements(MutableObject):
    """A set, or an array of bytes."""

    def _content(self) -> dict[Any, Any]:
        kind = frozenset if isinstance(self.target, set) else bytes
        return {WHOLE: Snapshot(kind(self.target))}

    def _fill(self, content: Mapping[Any, Any]) -> None:
        self.target.clear()
        add = self.target.update if isinstance(self.target, set) else self.target.extend
        add(content[WHOLE].value)


class NumpyArray(MutableObject):
    """A NumPy array that is small enough to be compared each time."""

    def _content(self) -> dict[Any, Any]:
        return {WHOLE: Snapshot(_Copy(self.target))}

    def _fill(self, content: Mapping[Any, Any]) -> None:
        self.target[...] = content[WHOLE].value.array


class _Copy:
    """A copy of an array, which equals one of the same bytes."""

    def __init__(self, array: Any) -> None:
        self.array = array.copy()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Copy) and self._bytes() == other._bytes()

    def _bytes(self) -> bytes:
        return self.array.tobytes()

    __hash__ = None  # type: ignore[assignment]


class IteratorPosition(MutableObject):
    """An iterator or a random generator: code that uses it advances it."""

    def _content(self) -> dict[Any, Any]:
        return {WHOLE: Snapshot(_position_of(self.target))}

    def _fill(self, content: Mapping[Any, Any]) -> None:
        # Nothing can rewind an iterator.
        if isinstance(self.target, _RANDOM):
            _set_state(self.target, pickle.loads(content[WHOLE].value))


def mutable_object(target: Any, path: str, outside: bool) -> MutableObject:
    """The ``MutableObject`` of the right class for any object."""
    if isinstance(target, dict):
        return DictEntries(target, path, outside)
    if isinstance(target, (list, collections.deque)):
        return ListItems(target, path, outside)
    if isinstance(target, (set, bytearray)):
        return SetElements(target, path, outside)
    if isinstance(target, CellType):
        return ClosureCell(target, path, outside)
    if isinstance(target, np.ndarray):
        return NumpyArray(target, path, outside)
    if is_random_generator(target) or is_iterator(target):
        return IteratorPosition(target, path, outside)
    return Attributes(target, path, outside)


def differences(
    before: Mapping[Any, Any], after: Mapping[Any, Any], absent: Any = None
) -> dict[Any, Any]:
    """Entries of ``after`` that have another value, and ``absent`` for removed ones.

    Values are compared by identity, snapshots by content.

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
    """Whether iterating over a value uses it up, like the result of ``iter``.

    An object of a user's own class holds its position in attributes.
    """
    kind = type(value)
    return hasattr(kind, "__next__") and not hasattr(value, "__dict__")


def _position_of(target: Any) -> Any:
    """A value that differs once an iterator or a random generator has advanced."""
    if isinstance(target, _RANDOM):
        return pickle.dumps(_state(target))
    if isinstance(target, _OPAQUE_ITERATORS):
        return object()  # it differs from itself, so code that can reach it is refused
    if isinstance(target, itertools.count):
        return repr(target)
    parts: list[Any] = []
    if isinstance(target, GeneratorType):
        parts.append(None if target.gi_frame is None else target.gi_frame.f_lasti)
    elif hasattr(target, "__length_hint__"):
        parts.append(target.__length_hint__())
    for part in gc.get_referents(target):
        inner = part if isinstance(target, (zip, map)) and type(part) is tuple else ()
        parts += [_position_of(each) for each in (part, *inner) if is_iterator(each)]
        parts.append(_Identity(part))
    return parts


class _Identity:
    """A value that equals nothing but itself."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other._value is self._value

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
