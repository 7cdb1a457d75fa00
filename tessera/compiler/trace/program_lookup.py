# SPDX-License-Identifier: Apache-2.0
"""Finds the program of a call among the last ones, by what distinguishes their calls.

Comparing all leaves of a call with those of each program would take longer than many a
program runs. Calls of one tree usually differ in one leaf: the batch has another shape,
``training`` is another bool. Only such leaves are looked at, and what is found is a
candidate: whoever runs it checks that it fits.
"""

import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from tessera.compiler.trace.arguments import leaf_signature

_Item = TypeVar("_Item")


@dataclass(slots=True, eq=False)
class _Entry(Generic[_Item]):
    """One item, and the signatures of the leaves that it was added for."""

    tree: Hashable
    signatures: tuple[Hashable, ...]
    item: _Item


@dataclass(slots=True, eq=False)
class _Index(Generic[_Item]):
    """The entries of one tree by the signatures at some positions, which all differ."""

    positions: tuple[int, ...] = ()
    entries: dict[Any, _Entry[_Item]] = field(default_factory=dict)

    @classmethod
    def of(cls, entries: Sequence[_Entry[_Item]]) -> "_Index[_Item]":
        """An index with at most one position for each entry but the first."""
        index = cls()
        for count, entry in enumerate(entries):
            other = index.entries.get(index._key(entry))
            if other is not None:
                pairs = zip(entry.signatures, other.signatures, strict=True)
                differing = next(i for i, (a, b) in enumerate(pairs) if a != b)
                index = cls((*index.positions, differing))
                index.entries = {index._key(e): e for e in entries[:count]}
            index.entries[index._key(entry)] = entry
        return index

    def _key(self, entry: _Entry[_Item]) -> tuple[Hashable, ...]:
        return tuple([entry.signatures[i] for i in self.positions])

    def find(self, leaves: Sequence[Any]) -> _Entry[_Item]:
        """The only entry that can be of these leaves; ``KeyError`` if there is none."""
        return self.entries[tuple([leaf_signature(leaves[i]) for i in self.positions])]


class ProgramLookup(Generic[_Item]):
    """The most recently used items, each for one kind of call.

    Args:
      size: How many are kept.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._indices: dict[Hashable, _Index[_Item]] = {}
        self._by_use: OrderedDict[_Entry[_Item], None] = OrderedDict()
        # What the last call found: the next one is probably of the same tree.
        self._last: tuple[Hashable, _Index[_Item]] | None = None
        self._newest: _Entry[_Item] | None = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._by_use)

    def find(self, tree: Hashable, leaves: Sequence[Any]) -> _Item | None:
        """The item that was added for such leaves, if one was; maybe one for others.

        Args:
          tree: The tree of the call, and whatever else must be equal.
          leaves: Its leaves.
        """
        last = self._last
        try:
            if last is not None and last[0] == tree:  # faster than hashing it
                index = last[1]
            else:
                index = self._indices[tree]
                self._last = tree, index
            entry = index.find(leaves)
        except (KeyError, TypeError):  # what has no hash was not added
            return None
        if entry is not self._newest:
            self._newest = entry
            try:  # noqa: SIM105 - a call spends no time on entering a context
                self._by_use.move_to_end(entry)
            except KeyError:
                pass  # another thread has just removed it
        return entry.item

    def add(self, tree: Hashable, leaves: Sequence[Any], item: _Item) -> None:
        """Add an item; it replaces one for leaves of the same signatures."""
        entry = _Entry(tree, tuple(map(leaf_signature, leaves)), item)
        with self._lock:
            for other in self._entries_of(tree):
                if other.signatures == entry.signatures:
                    self._remove(other)
            self._indices[tree] = _Index.of([*self._entries_of(tree), entry])
            self._by_use[entry] = None
            self._newest, self._last = entry, None
            if len(self._by_use) > self._size:
                self._remove(next(iter(self._by_use)))

    def _remove(self, entry: _Entry[_Item]) -> None:
        del self._by_use[entry]
        self._last = None
        others = [e for e in self._entries_of(entry.tree) if e is not entry]
        if others:
            self._indices[entry.tree] = _Index.of(others)
        else:
            del self._indices[entry.tree]

    def _entries_of(self, tree: Hashable) -> list[_Entry[_Item]]:
        index = self._indices.get(tree)
        return [] if index is None else list(index.entries.values())
