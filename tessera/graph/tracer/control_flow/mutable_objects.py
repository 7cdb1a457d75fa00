# SPDX-License-Identifier: Apache-2.0
"""Objects whose content code can change: dicts, lists, attributes, closures, globals.

A branch or a loop's body is traced by running it, so whatever its code changes has to
be found and undone. A ``MutableObject`` has content that can be read, compared and
restored, entry by entry. Iterators and NumPy arrays have none: a block may not name an
iterator from before it, and arrays are locked while it is traced.
"""

import collections
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import CellType, ModuleType
from typing import Any, Final

# The one entry of a variable.
VALUE: Final = "<value>"


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
    """A list, a deque or a bytearray."""

    def content(self) -> dict[Any, Any]:
        """The items, by index."""
        return dict(enumerate(self.target))

    def entry_name(self, entry: Any) -> str:
        """The name of an item, as ``rows[0]``."""
        return f"{self.path}[{entry!r}]"

    def _fill(self, content: Mapping[Any, Any]) -> None:
        self.target.clear()
        self.target.extend(content[i] for i in sorted(content))


class SetElements(MutableObject):
    """A set; an element is an entry that is there or not."""

    def content(self) -> dict[Any, Any]:
        """The elements, each as its own value."""
        return {element: element for element in self.target}

    def entry_name(self, entry: Any) -> str:
        """The name of an element, as ``2 in seen``."""
        return f"{entry!r} in {self.path}"

    def _fill(self, content: Mapping[Any, Any]) -> None:
        self.target.clear()
        self.target.update(content)


class ClosureCell(MutableObject):
    """A variable of a function that functions inside of it use, too."""

    def content(self) -> dict[Any, Any]:
        """The value, if one was assigned."""
        try:
            return {VALUE: self.target.cell_contents}
        except ValueError:  # not assigned yet
            return {}

    def _fill(self, content: Mapping[Any, Any]) -> None:
        if content:
            self.target.cell_contents = content[VALUE]
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


_CLASSES: dict[Any, type[MutableObject]] = {
    dict: DictEntries,
    (list, collections.deque, bytearray): ListItems,
    set: SetElements,
    CellType: ClosureCell,
}


def mutable_object(target: Any, path: str, outside: bool) -> MutableObject:
    """The ``MutableObject`` of the right class for any object."""
    for kinds, made in _CLASSES.items():
        if isinstance(target, kinds):
            return made(target, path, outside)
    return Attributes(target, path, outside)


def differences(
    before: Mapping[Any, Any], after: Mapping[Any, Any], absent: Any = None
) -> dict[Any, Any]:
    """Entries of ``after`` that have another value, and ``absent`` for removed ones.

    Values are compared by identity.

    Example:
      >>> differences({"a": 1, "b": 2}, {"a": 1, "c": 3})
      {'c': 3, 'b': None}
    """
    missing = object()
    found = {
        key: value
        for key, value in after.items()
        if before.get(key, missing) is not value
    }
    return found | {key: absent for key in before if key not in after}


def _attributes_of(target: Any) -> Mapping[str, Any]:
    """The attributes of an object, in ``__dict__`` and in slots."""
    if isinstance(target, (type, ModuleType)):
        return vars(target)
    state: Any = object.__getstate__(target)
    parts = state if isinstance(state, tuple) else (state,)
    return {name: part[name] for part in parts if part for name in part}


def is_iterator(value: Any) -> bool:
    """Whether iterating over a value uses it up, like the result of ``iter``.

    An object of a user's own class holds its position in attributes.
    """
    kind = type(value)
    return hasattr(kind, "__next__") and not hasattr(value, "__dict__")
