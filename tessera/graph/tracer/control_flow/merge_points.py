# SPDX-License-Identifier: Apache-2.0
"""Merge points: the value of a variable after an ``if``.

Its value on one branch must have the same type as on the other; a Python number
takes the dtype of an array, as it does in arithmetic. Two containers become a
third one with the merged content. Which of the two it stands for is only known when the
program runs, so from then on all three can be read, and none is the call's own to
change.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from tessera.errors import BranchError
from tessera.graph.tracer.control_flow.absent_values import NotReturned, Unusable
from tessera.graph.tracer.control_flow.block_state import Key, State, Tree
from tessera.graph.tracer.control_flow.conversion_state import current
from tessera.graph.tracer.control_flow.own_objects import (
    ABSENT,
    is_compared,
    mutable_objects,
)
from tessera.graph.tracer.control_flow.user_code import user_line
from tessera.graph.tracer.declared_layouts import is_number
from tessera.jax_compat import jaxprs, traces

SCALARS = (bool, int, float, complex)


@dataclass(frozen=True, eq=False)
class MergedNumber:
    """One number with its values on two branches, and its type after the merge."""

    pair: tuple[Any, Any]
    dtype: Any
    weak: bool

    def cast(self, value: Any, like: Any) -> Any:
        """The value of one branch in the common type; zeros if it has none."""
        if isinstance(value, NotReturned):
            return jaxprs.zeros(jax.typeof(like))
        value = traces.converted(value, self.dtype, self.weak)
        if isinstance(like, NotReturned):
            return value
        return traces.varying_over(value, traces.varying_axes(like))


@dataclass(frozen=True)
class Merged:
    """A merged value, whose leaves are numbers or what they are on both sides."""

    leaves: Sequence[Any]
    structure: Any


def filled(
    merged: Mapping[Key, Any], numbers: Mapping[MergedNumber, Any]
) -> dict[Key, Any]:
    """Merged values, with what a program computes for their numbers."""

    def fill_in(value: Any) -> Any:
        if not isinstance(value, Merged):
            return value
        leaves = [
            numbers[leaf] if isinstance(leaf, MergedNumber) else leaf
            for leaf in value.leaves
        ]
        return jax.tree.unflatten(value.structure, leaves)

    return {key: fill_in(value) for key, value in merged.items()}


@dataclass
class Merge:
    """The values of variables and entries at a merge point; mismatches are collected.

    Attributes:
      where: The statement, as ``the `if` at file.py:12``.
      state: The state before them.
      numbers: The numbers that the program computes, in the order of its outputs.
    """

    where: str
    state: State
    numbers: list[MergedNumber] = field(default_factory=list)
    _problems: list[tuple[str, str]] = field(default_factory=list)
    _deferred: list[tuple[str, str]] = field(default_factory=list)

    def merged(self, key: Key, first: Tree, second: Tree) -> Any:
        """The value after the merge; a variable with two types becomes unusable."""
        name, values = self.state.name(key), (first.value, second.value)
        if not self.state.is_variable(key):
            return self._tree(name, first, second)
        for value in values:
            if isinstance(value, Unusable):
                return value
        if any(value is ABSENT for value in values):
            return _assigned_on_one_way(name, self.where)
        count = len(self._problems)
        merged = self._tree(name, first, second)
        if len(self._problems) == count:
            return merged
        self._deferred += self._problems[count:]
        del self._problems[count:]
        return Unusable(self.disagreement)

    def _tree(self, name: str, first: Tree, second: Tree) -> Any:
        """The merged value, a ``Merged`` if it is new."""
        if first.value is second.value:
            return first.value
        for one, other in ((first, second), (second, first)):
            if isinstance(other.value, NotReturned):
                if self.state.holds(one.value):
                    return one.value  # what it holds is merged by itself
                return self._returned(one, is_first=one is first)
        if first.structure != second.structure:
            return self._mismatch(name, first.value, second.value)
        pairs = zip(first.leaves, second.leaves, first.paths, strict=True)
        leaves = [self._leaf(name + path, one, other) for one, other, path in pairs]
        # Only the program knows which of the two later code would change.
        conversion = current()
        for key in mutable_objects([first.value, second.value]):
            if conversion is not None:
                conversion.own.pop(key, None)
        return Merged(leaves, first.structure)

    def _leaf(self, name: str, first: Any, second: Any) -> Any:
        if first is second:
            return first
        if is_number(first) and is_number(second):
            return self._number(name, first, second)
        is_same = (
            type(first) is type(second)
            and type(first).__hash__ is not None
            and not is_compared(first)
            and first == second
        )
        return first if is_same is True else self._mismatch(name, first, second)

    def require_agreement(self) -> None:
        """Raise [T318] if entries, attributes or closed-over variables disagree."""
        if self._problems:
            raise self.disagreement()

    def disagreement(self) -> BranchError:
        """The error [T318] that names every variable and entry with two types."""
        problems = [*self._deferred, *self._problems]
        names = ", ".join(repr(name) for name, _ in problems)
        return BranchError(
            f"{names} {'has' if len(problems) == 1 else 'have'} another type on each "
            f"side of {self.where}",
            got="\n".join(f"{name}: {text}" for name, text in problems),
            fix="give it the same shape and dtype on both ways, e.g. with .astype or "
            "jnp.broadcast_to\n"
            "what is no array, nor a tree of arrays, has to be the same on both ways",
        )

    # --- numbers

    def _number(self, name: str, first: Any, second: Any) -> Any:
        same_kind = isinstance(first, SCALARS) and type(first) is type(second)
        if same_kind and first == second:
            return first
        common = _common(jax.typeof(first), jax.typeof(second))
        if common is None:
            return self._mismatch(name, first, second)
        self.numbers.append(MergedNumber((first, second), *common))
        return self.numbers[-1]

    def _returned(self, tree: Tree, *, is_first: bool) -> Merged:
        """The result of one branch, where the other has not returned yet."""
        nothing, leaves = NotReturned(), list[Any]()
        for leaf in tree.leaves:
            pair = (leaf, nothing) if is_first else (nothing, leaf)
            if is_number(leaf):
                dtype = jax.typeof(leaf).dtype
                self.numbers.append(MergedNumber(pair, dtype, False))
                leaf = self.numbers[-1]
            leaves.append(leaf)
        return Merged(leaves, tree.structure)

    def _mismatch(self, name: str, first: Any, second: Any) -> Any:
        texts = describe(first), describe(second)
        if texts[0] == texts[1]:
            texts = repr(first), repr(second)
        self._problems.append((name, f"{texts[0]} if it holds, {texts[1]} if not"))
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
    if first.dtype == second.dtype:
        return first.dtype, first.weak_type and second.weak_type
    strong = [each.dtype for each in (first, second) if not each.weak_type]
    if len(strong) == 2 or jnp.bool_ in (first.dtype, second.dtype):
        return None
    with jax.numpy_dtype_promotion("standard"):
        dtype = jnp.result_type(first, second)
    return (dtype, not strong) if not strong or dtype == strong[0] else None
