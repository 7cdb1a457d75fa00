# SPDX-License-Identifier: Apache-2.0
"""Finds the program of a call among the last ones, by what distinguishes their calls.

Comparing all leaves of a call with those of each program would take longer than many a
program runs. Calls of one tree usually differ in one leaf: the batch has another shape,
``training`` is another bool. Only such leaves are looked at, and what is found is a
candidate: whoever runs it checks that it fits.
"""

import itertools
import threading
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from jax.tree_util import PyTreeDef

from tessera.graph.tracer.argument_leaves import leaf_signature

_Item = TypeVar("_Item")

# Held while something is added: rare, and a lock of each lookup's own could be neither
# copied nor pickled with it.
_lock = threading.Lock()


@dataclass(slots=True, eq=False)
class _Entry(Generic[_Item]):
    """One item, and the call that it was added for: its context, tree and leaves."""

    kind: tuple[Hashable, PyTreeDef]
    signatures: tuple[Hashable, ...]
    item: _Item
    last_use: int


@dataclass(slots=True, eq=False)
class _Group(Generic[_Item]):
    """The entries of one context and tree.

    Attributes:
      kind: Context and tree.
      positions: Leaves in which entries differ: at most one for each but the first.
      entries: The entries by their signatures at these positions.
    """

    kind: tuple[Hashable, PyTreeDef]
    positions: tuple[int, ...]
    entries: dict[tuple[Hashable, ...], _Entry[_Item]]

    @classmethod
    def of(cls, entries: Sequence[_Entry[_Item]]) -> "_Group[_Item]":
        """The group of some entries of one kind."""
        group = cls(entries[0].kind, (), {})
        for count, entry in enumerate(entries):
            other = group.entries.get(group.key(entry.signatures))
            if other is not None:
                pairs = zip(entry.signatures, other.signatures, strict=True)
                differing = next(i for i, (a, b) in enumerate(pairs) if a != b)
                group = cls(group.kind, (*group.positions, differing), {})
                group.insert(entries[:count])
            group.insert([entry])
        return group

    def key(self, signatures: Sequence[Hashable]) -> tuple[Hashable, ...]:
        """The part of the signatures of a call by which its entry is found."""
        return tuple([signatures[i] for i in self.positions])

    def insert(self, entries: Iterable[_Entry[_Item]]) -> None:
        """Add entries that differ at the positions."""
        self.entries.update({self.key(entry.signatures): entry for entry in entries})


class ProgramLookup(Generic[_Item]):
    """The most recently used items, each for one kind of call.

    Args:
      size: How many are kept.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._entries: list[_Entry[_Item]] = []
        self._groups: dict[Hashable, _Group[_Item]] = {}
        # That of the last call: the next one is probably of the same group.
        self._last: _Group[_Item] | None = None
        self._clock = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    def find(
        self, context: Hashable, tree: PyTreeDef, leaves: Sequence[Any]
    ) -> _Item | None:
        """The item that was added for such a call, if one was; maybe one for another.

        Args:
          context: What else must be equal.
          tree: The tree of the call.
          leaves: Its leaves.
        """
        kind, group = (context, tree), self._last
        try:
            if group is None or group.kind != kind:  # faster than hashing it
                group = self._last = self._groups[kind]
            key = tuple([leaf_signature(leaves[i]) for i in group.positions])
            entry = group.entries[key]
        except (KeyError, TypeError):  # what has no hash was not added
            return None
        entry.last_use = next(self._clock)
        return entry.item

    def add(
        self, context: Hashable, tree: PyTreeDef, leaves: Sequence[Any], item: _Item
    ) -> None:
        """Add an item; it replaces one for a call of the same signatures."""
        kind, signatures = (context, tree), tuple(map(leaf_signature, leaves))
        with _lock:
            kept = [
                entry
                for entry in self._entries
                if entry.signatures != signatures or entry.kind != kind
            ]
            if len(kept) == self._size:
                kept.remove(min(kept, key=lambda entry: entry.last_use))
            self._entries = [*kept, _Entry(kind, signatures, item, next(self._clock))]
            groups: dict[Hashable, list[_Entry[_Item]]] = {}
            for entry in self._entries:
                groups.setdefault(entry.kind, []).append(entry)
            self._groups = {kind: _Group.of(own) for kind, own in groups.items()}
            self._last = None
