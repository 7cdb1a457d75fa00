# SPDX-License-Identifier: Apache-2.0
"""A block of code as a program, and what must agree where two ways meet.

Two ways meet after an ``if`` and at the end of each turn of a loop. What a place holds
on one way has to be of the same type as on the other; a Python number gives way to the
dtype of an array, as it does in arithmetic.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from tessera import _jax
from tessera.errors import BranchError, ControlFlowError
from tessera.graph.tracing.control_flow.state import (
    Key,
    NotReturned,
    State,
    Undefined,
)
from tessera.graph.tracing.declarations import is_number

_SCALARS = (bool, int, float, complex)
ABSENT: Final = object()  # an entry that a container does not have


@dataclass(frozen=True)
class Block:
    """A block that was run under a trace: its program, and what it left where.

    Attributes:
      program: Its outputs are the arrays that it left, each once.
      after: Every place that has another value than before, or ``ABSENT``.
      order: Which output an array is, by its id.
    """

    program: _jax.Program
    after: dict[Key, Any]
    order: dict[int, int]

    def value(self, leaf: Any, outputs: Sequence[Any]) -> Any:
        """A leaf of ``after``, from the outputs of the program."""
        return outputs[self.order[id(leaf)]] if id(leaf) in self.order else leaf


def traced_block(
    run: Callable[..., Any],
    state: State,
    before: dict[Key, Any],
    what: str,
    *,
    inputs: Sequence[Any] = (),
) -> Block:
    """Run a block under a trace of its own, and undo what it did to the state.

    Args:
      run: The block; takes traced values of the types of ``inputs``.
      state: What it may change.
      before: What the state holds when it begins.
      what: What messages call it.
      inputs: Types.
    """
    after: dict[Key, Any] = {}
    order: dict[int, int] = {}

    def flat(*values: Any) -> list[Any]:
        run(*values)
        now = state.read()
        after.update({k: v for k, v in now.items() if v is not before.get(k, ABSENT)})
        after.update({key: ABSENT for key in before if key not in now})
        arrays = [
            leaf for leaf in jax.tree.leaves(list(after.values())) if _is_array(leaf)
        ]
        unique = {id(leaf): leaf for leaf in arrays}
        order.update((name, place) for place, name in enumerate(unique))
        return [jnp.asarray(leaf) for leaf in unique.values()]

    try:
        program = jax.make_jaxpr(flat)(*inputs)
    except Exception as error:
        note = f"This was traced as a part of {what}, whether it runs or not"
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        raise
    finally:
        state.write(before)
    return Block(program, after, order)


def _is_array(leaf: Any) -> bool:
    return is_number(leaf) and not isinstance(leaf, _SCALARS)


# --- what is said of a place in the user's file


def user_line() -> str:
    """``file.py:12`` of the user's line that is being run."""
    frame = sys._getframe(1)
    while frame is not None:
        if not _jax.is_machinery(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown line"


def truth(value: Any, what: str) -> Any:
    """A traced value as one boolean, as Python takes it for a condition.

    Raises:
      ControlFlowError: [T319] it is not one number.
    """
    if jnp.ndim(value) != 0:
        raise ControlFlowError(
            f"the condition of {what} at {user_line()} is an array, not one number",
            got=described(value),
            fix="reduce it with .all() or .any(), or choose for each element with "
            "jnp.where",
        )
    return value if value.dtype == jnp.bool_ else value != jnp.zeros((), value.dtype)


def described(value: Any) -> str:
    """The type of a value in words: ``float32[4, 8]`` of an array."""
    if isinstance(value, (Undefined, NotReturned)) or value is ABSENT:
        return "nothing"
    if isinstance(value, _SCALARS):
        return f"the Python number {value!r}"
    if _is_array(value):
        return f"{value.dtype.name}{list(value.shape)}"
    if value is None or isinstance(value, str):
        return repr(value)
    if isinstance(value, Mapping):
        return f"a dict of {', '.join(map(repr, value)) or 'nothing'}"
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


# --- where two ways meet


@dataclass(frozen=True)
class Slot:
    """A place in a merged value for what the program computes."""

    number: int


def _varying_like(value: Any, like: Any) -> Any:
    """A value that varies over the manual mesh axes that another one varies over."""
    if isinstance(like, NotReturned):
        return value
    missing = _jax.varying_axes(like) - _jax.varying_axes(value)
    return jax.lax.pcast(value, tuple(missing), to="varying") if missing else value


def with_results(
    before: dict[Key, Any], merged: dict[Key, Any], results: Sequence[Any]
) -> dict[Key, Any]:
    """Every place after a merge, with what the program computed for the slots."""

    def fill(leaf: Any) -> Any:
        return results[leaf.number] if isinstance(leaf, Slot) else leaf

    filled = {key: jax.tree.map(fill, value) for key, value in merged.items()}
    return {k: v for k, v in (before | filled).items() if v is not ABSENT}


@dataclass(frozen=True)
class Meeting:
    """One number that comes by two ways, and the type that it has after."""

    first: Any
    second: Any
    dtype: Any
    weak: bool

    def cast(self, value: Any, like: Any) -> Any:
        """What one way brings, in the common type; ``like`` fills what it lacks."""
        if isinstance(value, NotReturned):
            return _jax.zeros(jax.typeof(like))
        if self.weak:
            kind: Any = {"i": int, "f": float, "c": complex}[self.dtype.kind]
            if isinstance(value, _SCALARS):
                value = kind(value)
            elif value.dtype != self.dtype:
                value = value * kind(1)
        else:
            value = jax.lax.convert_element_type(value, self.dtype)
        return _varying_like(value, like)


@dataclass
class Merge:
    """What places hold where two ways meet; mismatches are collected.

    Attributes:
      where: What meets, as ``the `if` at file.py:12``.
      ways: What messages call the two ways.
      relation: What messages say of places that do not agree.
    """

    where: str
    ways: tuple[str, str]
    relation: str = "another type on each side of"
    meetings: list[Meeting] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)

    def value(self, name: str, first: Any, second: Any) -> Any:
        """The merged value, with a ``Slot`` for each number that is computed."""
        if first is second:
            return first
        if isinstance(first, Undefined) or isinstance(second, Undefined):
            known = [way for way in (first, second) if isinstance(way, _OneSided)]
            return known[0] if known else _OneSided(name, self)
        if isinstance(first, NotReturned) or isinstance(second, NotReturned):
            given = second if isinstance(first, NotReturned) else first
            leaves, tree = jax.tree.flatten(given)
            filled = [self._filled(leaf, first, second) for leaf in leaves]
            return jax.tree.unflatten(tree, filled)
        paths, tree = jax.tree_util.tree_flatten_with_path(first)
        others, other_tree = jax.tree.flatten(second)
        if tree != other_tree:
            return self._mismatch(name, first, second)
        merged = [
            self._leaf(name + jax.tree_util.keystr(path), leaf, other)
            for (path, leaf), other in zip(paths, others, strict=True)
        ]
        return jax.tree.unflatten(tree, merged)

    def require_agreement(self) -> None:
        """Raise [T318] with every place that holds different types."""
        if not self.problems:
            return
        names = ", ".join(repr(name) for name, _ in self.problems)
        raise BranchError(
            f"{names} {'has' if len(self.problems) == 1 else 'have'} {self.relation} "
            f"{self.where}",
            got="\n".join(f"{name}: {text}" for name, text in self.problems),
            fix="give it the same shape and dtype on both ways, e.g. with .astype or "
            "jnp.broadcast_to\n"
            "what is no array, nor a tree of arrays, has to be the same on both ways",
        )

    def _leaf(self, name: str, first: Any, second: Any) -> Any:
        if first is second:
            return first
        if not (is_number(first) and is_number(second)):
            same = type(first) is type(second) and first == second
            return first if same is True else self._mismatch(name, first, second)
        same_kind = isinstance(first, _SCALARS) and type(first) is type(second)
        if same_kind and first == second:
            return first
        common = _common(jax.typeof(first), jax.typeof(second))
        if common is None:
            return self._mismatch(name, first, second)
        return self._slot(Meeting(first, second, *common))

    def _filled(self, leaf: Any, first: Any, second: Any) -> Any:
        """What is returned on one way, where the other has not returned yet."""
        if not is_number(leaf):
            return leaf
        aval = jax.typeof(leaf)
        ways = (leaf, second) if isinstance(second, NotReturned) else (first, leaf)
        return self._slot(Meeting(*ways, aval.dtype, False))

    def _slot(self, meeting: Meeting) -> Slot:
        self.meetings.append(meeting)
        return Slot(len(self.meetings) - 1)

    def _mismatch(self, name: str, first: Any, second: Any) -> Any:
        texts = (described(first), described(second))
        if texts[0] == texts[1]:
            texts = (repr(first), repr(second))
        ways = ", ".join(f"{t} {w}" for t, w in zip(texts, self.ways, strict=True))
        self.problems.append((name, ways))
        return first


class _OneSided(Undefined):
    """A variable that one way has given a value, and the other has not."""

    def __init__(self, name: str, merge: Merge) -> None:
        super().__init__(name)
        self._merge = merge

    def read(self) -> Any:
        """Raise [T318]: whether there is a value is only known when it runs."""
        raise BranchError(
            f"{self.name!r} has a value on one way only through {self._merge.where}, "
            f"and is used at {user_line()}",
            fix="give it a value before, or on both ways",
        )


def _common(first: Any, second: Any) -> tuple[Any, bool] | None:
    """The dtype of two types where they meet, and whether it is weak; None if none."""
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
    """The order in which kinds of numbers give way: int, float, complex."""
    kinds = (np.integer, np.floating, np.complexfloating)
    return 1 + next(
        (place for place, kind in enumerate(kinds) if jnp.issubdtype(dtype, kind)), -1
    )
