# SPDX-License-Identifier: Apache-2.0
"""Merge points: the value of a variable after an ``if``, and after a loop iteration.

Its value on one branch must have the same type as on the other; a Python number
takes the dtype of an array, as it does in arithmetic. Two containers become a
third one with the merged content. Which of the two it stands for is only known when the
program runs, so all three can be read but not changed from then on.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tessera.errors import BranchError
from tessera.graph.tracer.control_flow.active_conversion import current
from tessera.graph.tracer.control_flow.block_state import (
    ABSENT,
    Key,
    NotReturned,
    State,
    Unusable,
)
from tessera.graph.tracer.control_flow.containers import BranchContents, parts_of
from tessera.graph.tracer.control_flow.user_code import user_line
from tessera.graph.tracer.declared_layouts import is_number
from tessera.jax_compat import jaxprs

SCALARS = (bool, int, float, complex)

_IMMUTABLE = (str, bytes, range, frozenset, type, np.dtype)


@dataclass(frozen=True)
class Slot:
    """A number in a merged value that the program computes."""

    number: int


@dataclass(eq=False)
class MergedContainer:
    """A container in a merged value, rebuilt from merged parts.

    Attributes:
      make: Makes it.
      parts: What it is made from, in order.
      name: What messages call it.
    """

    make: Callable[[Sequence[Any]], Any]
    parts: tuple[Any, ...]
    name: str

    def structure(self) -> tuple[Any, ...]:
        """Equal to that of another one that a loop can carry in its place."""
        inner = (
            p.structure() if isinstance(p, MergedContainer) else type(p)
            for p in self.parts
        )
        return tuple(inner)


class MergeResult:
    """Merged values, with the outputs of the program in their slots.

    Attributes:
      values: Every variable and entry after the merge.
      made: The objects that are new in them.
      ambiguous: New containers, which must not be changed, and what they are called.
    """

    def __init__(
        self,
        before: Mapping[Key, Any],
        merged: Mapping[Key, Any],
        results: Sequence[Any],
    ) -> None:
        self._results, self._made = results, dict[int, Any]()
        self.ambiguous: list[tuple[Any, str]] = []
        filled = {key: self._fill(value) for key, value in merged.items()}
        now = {**before, **filled}
        self.values = {key: v for key, v in now.items() if v is not ABSENT}
        self.made = [*self._made.values(), *results]

    def _fill(self, value: Any) -> Any:
        if isinstance(value, Slot):
            return self._results[value.number]
        if not isinstance(value, MergedContainer):
            return value
        if id(value) not in self._made:
            made = value.make([self._fill(part) for part in value.parts])
            self._made[id(value)] = made
            if not isinstance(made, tuple):
                self.ambiguous.append((made, value.name))
        return self._made[id(value)]


@dataclass(frozen=True)
class MergedNumber:
    """One number with its values on two branches, and its type after the merge."""

    first: Any
    second: Any
    dtype: Any
    weak: bool

    def cast(self, value: Any, like: Any) -> Any:
        """The value of one branch in the common type; zeros if it has none."""
        if isinstance(value, NotReturned):
            return jaxprs.zeros(jax.typeof(like))
        if self.weak:
            kinds = {"b": bool, "i": int, "f": float, "c": complex}
            kind: Any = kinds[self.dtype.kind]
            if isinstance(value, SCALARS):
                value = kind(value)
            elif value.dtype != self.dtype:
                value = value * kind(1)
        else:
            value = jax.lax.convert_element_type(value, self.dtype)
        return _varying_like(value, like)


def _varying_like(value: Any, like: Any) -> Any:
    """A value that varies over the manual mesh axes that another one varies over."""
    if isinstance(like, NotReturned):
        return value
    missing = jaxprs.varying_axes(like) - jaxprs.varying_axes(value)
    return jax.lax.pcast(value, tuple(missing), to="varying") if missing else value


@dataclass
class Merge:
    """The values of variables and entries at a merge point; mismatches are collected.

    Attributes:
      where: The statement, as ``the `if` at file.py:12``.
      ways: The names of the two branches in messages.
      state: The state before them.
      sides: The contents of containers after each branch.
      relation: How messages describe a mismatch.
      meetings: The numbers that the program computes, in the order of their slots.
    """

    where: str
    ways: tuple[str, str]
    state: State
    branch_contents: tuple[BranchContents, BranchContents]
    relation: str = "another type on each side of"
    numbers: list[MergedNumber] = field(default_factory=list)
    _problems: list[tuple[str, str]] = field(default_factory=list)
    _deferred: list[tuple[str, str]] = field(default_factory=list)
    _pairs: dict[tuple[int, int], Any] = field(default_factory=dict)
    _reachable: dict[int, tuple[Any, str]] = field(default_factory=dict)

    def merged(self, key: Key, first: Any, second: Any) -> Any:
        """The value after the merge; a variable with two types becomes unusable."""
        if not self.state.is_variable(key):
            return self.value(key.name, first, second)
        for value in (first, second):
            if isinstance(value, Unusable):
                return value
        if first is ABSENT or second is ABSENT:
            return _assigned_on_one_way(key.name, self.where)
        count = len(self._problems)
        merged = self.value(key.name, first, second)
        if len(self._problems) == count:
            return merged
        self._deferred += self._problems[count:]
        del self._problems[count:]
        return Unusable(self.disagreement)

    def value(self, name: str, first: Any, second: Any) -> Any:
        """The merged value; what is new is a ``Slot`` or a ``MergedContainer``."""
        if first is second:
            return first
        if isinstance(first, NotReturned) or isinstance(second, NotReturned):
            return self._returned(name, first, second)
        if is_number(first) and is_number(second):
            return self._number(name, first, second)
        if type(first) is not type(second):
            return self._mismatch(name, first, second)
        if isinstance(first, _IMMUTABLE):
            return first if first == second else self._mismatch(name, first, second)
        return self._container(name, first, second)

    def require_agreement(self) -> None:
        """Raise [T318] if entries, attributes or closed-over variables disagree."""
        if self._problems:
            raise self.disagreement()

    def disagreement(self) -> BranchError:
        """The error [T318] that names every variable and entry with two types."""
        problems = [*self._deferred, *self._problems]
        names = ", ".join(repr(name) for name, _ in problems)
        return BranchError(
            f"{names} {'has' if len(problems) == 1 else 'have'} {self.relation} "
            f"{self.where}",
            got="\n".join(f"{name}: {text}" for name, text in problems),
            fix="give it the same shape and dtype on both ways, e.g. with .astype or "
            "jnp.broadcast_to\n"
            "what is no array, nor a tree of arrays, has to be the same on both ways",
        )

    def record_ambiguous(self, filled: MergeResult) -> None:
        """Forbid mutations of what stands for one of two from now on."""
        conversion = current()
        if conversion is not None:
            for thing, name in (*filled.ambiguous, *self._reachable.values()):
                conversion.record_ambiguous(thing, name, self.where)
            conversion.merged |= {id(each): each for each in filled.made}

    # --- numbers

    def _number(self, name: str, first: Any, second: Any) -> Any:
        same_kind = isinstance(first, SCALARS) and type(first) is type(second)
        if same_kind and first == second:
            return first
        common = _common(jax.typeof(first), jax.typeof(second))
        if common is None:
            return self._mismatch(name, first, second)
        return self._slot(MergedNumber(first, second, *common))

    def _slot(self, number: MergedNumber) -> Slot:
        self.numbers.append(number)
        return Slot(len(self.numbers) - 1)

    def _returned(self, name: str, first: Any, second: Any) -> Any:
        """The result of one branch, where the other has not returned yet."""
        way = int(isinstance(first, NotReturned))
        given = (first, second)[way]
        if is_number(given):
            return self._slot(
                MergedNumber(first, second, jax.typeof(given).dtype, False)
            )
        if id(given) in self.branch_contents[way].changed:
            return self._mismatch(name, first, second)
        parts = parts_of(given, self.branch_contents[way].contents)
        if parts is None:
            return given
        inner = [
            self._returned(name, *((part, second) if way == 0 else (first, part)))
            for part in parts.parts.values()
        ]
        self._note_reachable(name, given)
        return MergedContainer(parts.make, tuple(inner), name)

    # --- containers

    def _container(self, name: str, first: Any, second: Any) -> Any:
        pair = id(first), id(second)
        if pair in self._pairs:  # None while it is being merged: it holds itself
            return self._pairs[pair] or self._mismatch(name, first, second)
        ways = list(zip((first, second), self.branch_contents, strict=True))
        if any(id(value) in side.changed for value, side in ways):
            return self._mismatch(name, first, second)
        ours, theirs = (parts_of(value, side.contents) for value, side in ways)
        self._pairs[pair] = merged = None
        if ours is None or theirs is None:
            has_value = type(first).__eq__ is not object.__eq__
            if has_value and (first == second) is True:
                merged = first
        elif ours.form == theirs.form:
            inner = [
                self.value(f"{name}{index}", part, theirs.parts[index])
                for index, part in ours.parts.items()
            ]
            merged = MergedContainer(ours.make, tuple(inner), name)
        if merged is None:
            return self._mismatch(name, first, second)
        self._pairs[pair] = merged
        if not isinstance(first, tuple):
            self._note_reachable(name, first)
            self._note_reachable(name, second)
            if merged is first and type(first).__hash__ is None:
                self._reachable[id(first)] = first, name
        return merged

    def _note_reachable(self, name: str, value: Any) -> None:
        """Record one of two that code may still reach under another name."""
        if self.state.holds(value):
            self._reachable[id(value)] = value, name

    def _mismatch(self, name: str, first: Any, second: Any) -> Any:
        texts = describe(first), describe(second)
        if texts[0] == texts[1]:
            texts = repr(first), repr(second)
        ways = ", ".join(f"{t} {w}" for t, w in zip(texts, self.ways, strict=True))
        self._problems.append((name, ways))
        return first


def _assigned_on_one_way(name: str, where: str) -> Unusable:
    """What a variable is that has a value after one branch only."""

    def error() -> BranchError:
        return BranchError(
            f"{name!r} has a value on one way only through {where}, and is used at "
            f"{user_line()}",
            fix="give it a value before, or on both ways",
        )

    return Unusable(error)


def describe(value: Any) -> str:
    """The type of a value in words: ``float32[4, 8]`` of an array."""
    if isinstance(value, NotReturned) or value is ABSENT:
        return "nothing"
    if isinstance(value, SCALARS):
        return f"the Python number {value!r}"
    if is_number(value):
        return f"{value.dtype.name}{list(value.shape)}"
    if value is None or isinstance(value, str):
        return repr(value)
    if isinstance(value, Mapping):
        return f"a dict of {', '.join(map(repr, value)) or 'nothing'}"
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


def _common(first: Any, second: Any) -> tuple[Any, bool] | None:
    """The common dtype of two types, and whether it is weak; None if there is none."""
    if first.shape != second.shape:
        return None
    weak = first.weak_type, second.weak_type
    if first.dtype == second.dtype:
        return first.dtype, all(weak)
    if weak == (True, True):
        return max(first.dtype, second.dtype, key=_rank), True
    for narrow, wide in ((first, second), (second, first)):
        if narrow.weak_type and 0 < _rank(narrow.dtype) <= _rank(wide.dtype):
            return wide.dtype, False
    return None


def _rank(dtype: Any) -> int:
    """The promotion order of kinds of numbers: int, float, complex."""
    kinds = (np.integer, np.floating, np.complexfloating)
    return 1 + next(
        (index for index, kind in enumerate(kinds) if jnp.issubdtype(dtype, kind)), -1
    )
