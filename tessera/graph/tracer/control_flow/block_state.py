# SPDX-License-Identifier: Apache-2.0
"""The state that a block of code can change: read before and after it, then restored.

A branch is traced by running it. What it changed is found by comparing this state
before and after, and is then undone: the outputs of the traced program take its place.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import CellType
from typing import Any, NamedTuple

import jax

from tessera.errors import ControlFlowError
from tessera.graph.tracer.control_flow.conversion_state import current
from tessera.graph.tracer.control_flow.lower_jumps import display_name
from tessera.graph.tracer.control_flow.own_objects import (
    ABSENT,
    TREES,
    attributes,
    change_error,
    content,
    differences,
    is_compared,
    is_iterator,
    restore,
)

Contents = list[dict[Any, Any]]


@dataclass(frozen=True)
class Tree:
    """A value as it is at the end of a block, flattened.

    Attributes:
      value: The value, whose content may be undone since.
      leaves: Its leaves.
      paths: Where they are, as messages write it: ``['loss']``.
      structure: JAX's tree definition.
    """

    value: Any
    leaves: Sequence[Any]
    paths: Sequence[str]
    structure: Any


def flattened(value: Any) -> Tree:
    """A value as it is now."""
    pairs, structure = jax.tree_util.tree_flatten_with_path(value, is_leaf=is_iterator)
    paths = [jax.tree_util.keystr(path) for path, _ in pairs]
    return Tree(value, [leaf for _, leaf in pairs], paths, structure)


class Key(NamedTuple):
    """One variable, or one entry of an object.

    Attributes:
      target: The number of the variable or object in the state.
      entry: The entry.
    """

    target: int
    entry: Any


class State:
    """The variables of a block, and what the call has made before it.

    Args:
      functions: The functions that are its code.
    """

    def __init__(self, functions: Iterable[Any]) -> None:
        conversion = current()
        own = [value for value, _ in conversion.own.values()] if conversion else []
        named: dict[int, tuple[str, CellType]] = {}
        for function in functions:
            names, cells = function.__code__.co_freevars, function.__closure__ or ()
            for name, cell in zip(names, cells, strict=True):
                named.setdefault(id(cell), (display_name(name), cell))
        self._names = [name for name, _ in named.values()]
        trees = [value for value in own if isinstance(value, TREES)]
        self._targets = [*(cell for _, cell in named.values()), *trees]
        self._ids = {id(target) for target in self._targets}
        # Of a dict or list of a class with attributes, only the entries are merged.
        others = [(v, attributes if isinstance(v, TREES) else content) for v in own]
        self._others = [(v, read, read(v)) for v, read in others if is_compared(v)]

    def read(self) -> Contents:
        """What every variable, dict and list holds."""
        return [content(target) for target in self._targets]

    def write(self, contents: Contents) -> None:
        """Set what every variable, dict and list holds."""
        for target, held in zip(self._targets, contents, strict=True):
            restore(target, held)

    def value(self, contents: Contents, key: Key) -> Any:
        """The value of a variable or an entry; ``ABSENT`` if it has none."""
        return contents[key.target].get(key.entry, ABSENT)

    def updated(self, contents: Contents, values: Mapping[Key, Any]) -> Contents:
        """Contents with other values; what is ``ABSENT`` is removed."""
        found = [dict(held) for held in contents]
        for key, value in values.items():
            if value is ABSENT:
                found[key.target].pop(key.entry, None)
            else:
                found[key.target][key.entry] = value
        return found

    def changes(self, before: Contents, after: Contents) -> list[Key]:
        """The variables and entries that have changed or were removed."""
        return [
            Key(number, entry)
            for number, pair in enumerate(zip(before, after, strict=True))
            for entry in differences(*pair)
        ]

    def trees(self, contents: Contents, keys: Iterable[Key]) -> dict[Key, Tree]:
        """The values of some variables and entries, flattened with what they hold."""
        now = self.read()
        self.write(contents)
        found = {key: flattened(self.value(contents, key)) for key in keys}
        self.write(now)
        return found

    def require_others_unchanged(self, what: str) -> None:
        """Raise [T319] where code that is not converted has changed another object."""
        for value, read, held in self._others:
            if differences(held, read(value)):
                change = f"an object in {what} is changed"
                raise change_error(value, change, of_block=True)

    def require_same_order(self, ends: Iterable[Contents], what: str) -> None:
        """Raise [T319] where the keys of a dict are in another order than in an end."""
        for end in ends:
            for target, held in zip(self._targets, end, strict=True):
                now = content(target)
                if isinstance(target, dict) and [*now] != [*held]:
                    raise ControlFlowError(
                        f"the order of a dict's keys depends on {what}",
                        got=f"{[*now]} or {[*held]}",
                        fix="add or replace the same keys in the same order on both "
                        "ways, or give them values before",
                    )

    def holds(self, target: Any) -> bool:
        """Whether it is a dict or list that the call has made before the block."""
        return id(target) in self._ids

    def is_variable(self, key: Key) -> bool:
        """Whether a key is a variable, and not an entry or an attribute."""
        return key.target < len(self._names)

    def name(self, key: Key) -> str:
        """What messages call a variable or an entry, as ``state['loss']``."""
        target = self._targets[key.target]
        waiting: list[Any] = self._targets[: len(self._names)]
        names = dict(zip(map(id, waiting), self._names, strict=True))
        while waiting and id(target) not in names:
            holder = waiting.pop(0)
            for entry, value in content(holder).items():
                if id(value) not in names:
                    names[id(value)] = names[id(holder)] + _entry_name(holder, entry)
                    if self.holds(value):
                        waiting.append(value)
        owner = names.get(id(target), f"a {type(target).__name__}")
        return owner + _entry_name(target, key.entry)


def _entry_name(target: Any, entry: Any) -> str:
    """How code writes an entry, after the name of what holds it."""
    return "" if isinstance(target, CellType) else f"[{entry!r}]"
