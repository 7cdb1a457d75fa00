# SPDX-License-Identifier: Apache-2.0
"""Objects whose content code can change: dicts, lists, attributes, closures, globals.

A branch or a loop's body is traced by running it, so whatever its code changes has to
be found and undone. A ``MutableObject`` has content that can be read, compared and
restored, entry by entry. A set, a NumPy array, an iterator and a random generator have
one entry, their whole content, which can be compared but cannot be traced.
"""

import collections
import gc
import itertools
import operator
import pickle
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
class MutableObject(ABC):
    """One object with content that code can change.

    Attributes:
      target: The object itself.
      path: Its name in messages, as ``state['inner']``.
      outside: Whether it outlives the trace, as global variables do. What a program
        computes must not be left in it.
      names: The entries that the code in question can name; None for all.
    """

    target: Any
    path: str
    outside: bool
    names: frozenset[str] | None = None

    @abstractmethod
    def content(self) -> dict[Any, Any]:
        """The present content, by entry."""

    def fill(self, content: Mapping[Any, Any]) -> None:
        """Restore this content; what is equal already is left alone."""
        if differences(self.content(), content):
            self._fill(content)

    def entry_name(self, entry: Any) -> str:
        """The name of an entry in messages."""
        del entry
        return self.path

    @abstractmethod
    def _fill(self, content: Mapping[Any, Any]) -> None:
        """Restore this content, which differs from the present one."""

    def _is_named(self, entry: Any) -> bool:
        return self.names is None or entry in self.names


class DictEntries(MutableObject):
    """A dict."""

    def content(self) -> dict[Any, Any]:
        """The entries."""
        entries = dict.items(self.target)
        return {entry: value for entry, value in entries if self._is_named(entry)}

    def entry_name(self, entry: Any) -> str:
        """The name of an entry, as ``state['loss']``."""
        return f"{self.path}[{entry!r}]"

    def _fill(self, content: Mapping[Any, Any]) -> None:
        for entry in self.content().keys() - content.keys():
            dict.__delitem__(self.target, entry)
        dict.update(self.target, content)


class GlobalVariables(DictEntries):
    """The global variables of a module, those that code can name."""

    def entry_name(self, entry: Any) -> str:
        """The variable."""
        return str(entry)


class ListItems(MutableObject):
    """A list, or a deque."""

    def content(self) -> dict[Any, Any]:
        """The items, by index."""
        return dict(enumerate(self.target))

    def entry_name(self, entry: Any) -> str:
        """The name of an item, as ``rows[0]``."""
        return f"{self.path}[{entry!r}]"

    def _fill(self, content: Mapping[Any, Any]) -> None:
        self.target.clear()
        self.target.extend(content[i] for i in sorted(content))


class ClosureCell(MutableObject):
    """A variable of a function that functions inside of it use, too."""

    def content(self) -> dict[Any, Any]:
        """The value, if one was assigned."""
        try:
            return {WHOLE: self.target.cell_contents}
        except ValueError:  # not assigned yet
            return {}

    def _fill(self, content: Mapping[Any, Any]) -> None:
        if content:
            self.target.cell_contents = content[WHOLE]
        else:
            del self.target.cell_contents


class Attributes(MutableObject):
    """An object, a class or a module."""

    def content(self) -> dict[Any, Any]:
        """The attributes, in slots too."""
        found = _attributes_of(self.target).items()
        return {name: value for name, value in found if self._is_named(name)}

    def entry_name(self, entry: Any) -> str:
        """The name of an attribute, as ``model.scale``."""
        return f"{self.path}.{entry}"

    def _fill(self, content: Mapping[Any, Any]) -> None:
        owner = type if isinstance(self.target, type) else object
        now = self.content()
        for name in now.keys() - content.keys():
            owner.__delattr__(self.target, name)
        for name, value in content.items():
            if name not in now or now[name] is not value:
                owner.__setattr__(self.target, name, value)


@dataclass(frozen=True)
class Snapshot:
    """All content of an object as one value, which is compared by ``==``.

    Attributes:
      value: What is compared.
      copy: What the content is restored from, where that is not the value itself.
    """

    value: Any
    copy: Any = field(default=None, compare=False)


class WholeContent(MutableObject):
    """A set, an array of bytes or numbers, an iterator or a random generator."""

    def content(self) -> dict[Any, Any]:
        """One snapshot; of an iterator or a random generator, its position."""
        target = self.target
        if isinstance(target, np.ndarray):
            return {WHOLE: Snapshot(target.tobytes(), target.copy())}
        if isinstance(target, (set, bytearray)):
            kind = frozenset if isinstance(target, set) else bytes
            return {WHOLE: Snapshot(kind(target))}
        return {WHOLE: Snapshot(_position_of(target))}

    def _fill(self, content: Mapping[Any, Any]) -> None:
        target, snapshot = self.target, content[WHOLE]
        if isinstance(target, np.ndarray):
            target[...] = snapshot.copy
        elif isinstance(target, (set, bytearray)):
            target.clear()
            add = target.update if isinstance(target, set) else target.extend
            add(snapshot.value)
        elif isinstance(target, _RANDOM):  # nothing can rewind an iterator
            _state_of(target)[1](pickle.loads(snapshot.value))


_CLASSES: dict[Any, type[MutableObject]] = {
    dict: DictEntries,
    (list, collections.deque): ListItems,
    CellType: ClosureCell,
    (set, bytearray, np.ndarray, *_RANDOM): WholeContent,
}


def mutable_object(target: Any, path: str, outside: bool) -> MutableObject:
    """The ``MutableObject`` of the right class for any object."""
    for kinds, made in _CLASSES.items():
        if isinstance(target, kinds):
            return made(target, path, outside)
    made = WholeContent if is_iterator(target) else Attributes
    return made(target, path, outside)


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


def _attributes_of(target: Any) -> Mapping[str, Any]:
    """The attributes of an object, in ``__dict__`` and in slots."""
    if isinstance(target, (type, ModuleType)):
        return vars(target)
    state: Any = object.__getstate__(target)
    parts = state if isinstance(state, tuple) else (state,)
    return {name: part[name] for part in parts if part for name in part}


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
        return pickle.dumps(_state_of(target)[0]())
    if isinstance(target, _OPAQUE_ITERATORS):
        return object()  # it differs from itself, so code that can reach it is refused
    if isinstance(target, itertools.count):
        return repr(target)
    parts: list[Any] = []
    if isinstance(target, GeneratorType):
        parts.append(None if target.gi_frame is None else target.gi_frame.f_lasti)
    elif hasattr(target, "__length_hint__"):
        parts.append(operator.length_hint(target))  # 0 of one without end
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


def _state_of(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """The functions that read and write the state of a random generator."""
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    if isinstance(generator, np.random.Generator):
        bits: Any = generator.bit_generator
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    return generator.get_state, generator.set_state
