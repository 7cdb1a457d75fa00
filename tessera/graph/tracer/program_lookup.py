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
from itertools import chain
from typing import Any, Generic, TypeVar

from jax.tree_util import PyTreeDef

from tessera.graph.tracer.argument_leaves import leaf_signature

_Item = TypeVar("_Item")

# Held while something is added: rare, and a lock of each lookup's own could be neither
# copied nor pickled with it.
_lock = threading.Lock()


@dataclass(slots=True, eq=False)
class _Entry(Generic[_Item]):
    """One item, and the call that it was added for."""

    group: Hashable
    tree: PyTreeDef
    signatures: tuple[Hashable, ...]
    item: _Item


@dataclass(slots=True, eq=False)
class _Index(Generic[_Item]):
    """The entries of one group by the signatures of their leaves at some positions.

    Entries of one tree differ there. A group has few trees: the hash of a tree leaves
    out only the keys of dicts.
    """

    positions: tuple[int, ...] = ()
    entries: dict[Any, list[_Entry[_Item]]] = field(default_factory=dict)

    @classmethod
    def of(cls, entries: Sequence[_Entry[_Item]]) -> "_Index[_Item]":
        """An index with at most one position for each entry but the first."""
        index = cls()
        for count, entry in enumerate(entries):
            if other := index._like(entry):
                pairs = zip(entry.signatures, other.signatures, strict=True)
                differing = next(i for i, (a, b) in enumerate(pairs) if a != b)
                index = cls((*index.positions, differing))
                for earlier in entries[:count]:
                    index._insert(earlier)
            index._insert(entry)
        return index

    def _key(self, entry: _Entry[_Item]) -> tuple[Hashable, ...]:
        return tuple([entry.signatures[i] for i in self.positions])

    def _like(self, entry: _Entry[_Item]) -> _Entry[_Item] | None:
        same = self.entries.get(self._key(entry), ())
        return next((other for other in same if other.tree == entry.tree), None)

    def _insert(self, entry: _Entry[_Item]) -> None:
        self.entries.setdefault(self._key(entry), []).append(entry)

    def find(self, tree: PyTreeDef, leaves: Sequence[Any]) -> _Entry[_Item] | None:
        """The only entry that can be of a call."""
        key = tuple([leaf_signature(leaves[i]) for i in self.positions])
        # The trees of two calls are equal the fastest if they have the same keys, not
        # equal ones: so that of the entry is compared, and not one of the group.
        for entry in self.entries.get(key, ()):
            if entry.tree == tree:
                return entry
        return None


class ProgramLookup(Generic[_Item]):
    """The most recently used items, each for one kind of call.

    Args:
      size: How many are kept.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._indices: dict[Hashable, _Index[_Item]] = {}
        self._by_use: OrderedDict[_Entry[_Item], None] = OrderedDict()
        # What the last call found: the next one is probably of the same group.
        self._last: tuple[Hashable, _Index[_Item]] | None = None
        self._newest: _Entry[_Item] | None = None

    def __len__(self) -> int:
        return len(self._by_use)

    def find(
        self, context: Hashable, tree: PyTreeDef, leaves: Sequence[Any]
    ) -> _Item | None:
        """The item that was added for such a call, if one was; maybe one for another.

        Args:
          context: What else must be equal.
          tree: The tree of the call.
          leaves: Its leaves.
        """
        last = self._last
        try:
            group = context, hash(tree)
            if last is not None and last[0] == group:  # faster than hashing it
                index = last[1]
            else:
                index = self._indices[group]
                self._last = group, index
            entry = index.find(tree, leaves)
        except (KeyError, TypeError):  # what has no hash was not added
            return None
        if entry is None:
            return None
        if entry is not self._newest:
            self._newest = entry
            try:  # noqa: SIM105 - a call spends no time on entering a context
                self._by_use.move_to_end(entry)
            except KeyError:
                pass  # another thread has just removed it
        return entry.item

    def add(
        self, context: Hashable, tree: PyTreeDef, leaves: Sequence[Any], item: _Item
    ) -> None:
        """Add an item; it replaces one for a call of the same signatures."""
        signatures = tuple(map(leaf_signature, leaves))
        entry = _Entry((context, hash(tree)), tree, signatures, item)
        with _lock:
            for other in self._entries_of(entry.group):
                if other.signatures == signatures and other.tree == tree:
                    self._remove(other)
            entries = [*self._entries_of(entry.group), entry]
            self._indices[entry.group] = _Index.of(entries)
            self._by_use[entry] = None
            self._newest, self._last = entry, None
            if len(self._by_use) > self._size:
                self._remove(next(iter(self._by_use)))

    def _remove(self, entry: _Entry[_Item]) -> None:
        del self._by_use[entry]
        self._last = None
        others = [e for e in self._entries_of(entry.group) if e is not entry]
        if others:
            self._indices[entry.group] = _Index.of(others)
        else:
            del self._indices[entry.group]

    def _entries_of(self, group: Hashable) -> list[_Entry[_Item]]:
        index = self._indices.get(group)
        return [] if index is None else list(chain(*index.entries.values()))
