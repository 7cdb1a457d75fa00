# SPDX-License-Identifier: Apache-2.0
"""``while`` and ``for`` on traced values: ``while_loop``, or unrolled.

``while`` on a traced condition and ``for`` over ``range`` of traced numbers become
``jax.lax.while_loop``. Loops over what Python knows, such as the rows of an array, are
run by Python, so the program has their iterations one after the other.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CellType
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from tessera.errors import ControlFlowError
from tessera.graph.tracer.control_flow.absent_values import Unusable
from tessera.graph.tracer.control_flow.block_state import Key, State
from tessera.graph.tracer.control_flow.branches import choose
from tessera.graph.tracer.control_flow.merge_points import (
    Merge,
    Merged,
    Slot,
    describe,
    filled,
)
from tessera.graph.tracer.control_flow.own_objects import (
    ABSENT,
    VALUE,
    is_iterator,
)
from tessera.graph.tracer.control_flow.traced_blocks import Block, traced_block, truth
from tessera.graph.tracer.control_flow.user_code import user_line
from tessera.jax_compat import jaxprs, traces
from tessera.tracing import scope

_GOING = "whether to go on"

# Each run may find more that an iteration changes, because of the one before.
_MAX_TRIALS = 8


def _is_traced(value: Any) -> bool:
    return isinstance(value, jaxprs.Tracer)


# --- statements


def while_stmt(test: Callable[[], Any], body: Callable[[], None]) -> None:
    """A ``while``: Python's own until its condition is traced."""
    while not _is_traced(holds := test()):
        if not holds:
            return
        body()
    going = CellType(truth(holds, "the `while`"))

    def turn() -> None:
        body()
        going.cell_contents = truth(jnp.asarray(test()), "the `while`")

    state = State((test, body), {_GOING: going})
    _while_loop(turn, state, f"the `while` at {user_line()}")


def for_stmt(
    iterated: Any, left: Callable[[], Any], body: Callable[[Any], None]
) -> None:
    """A ``for``; ``left`` is whether a ``break`` or ``return`` was met."""
    if isinstance(iterated, TracedRange):
        _for_range(iterated, left, body)
        return
    for item in iterated:
        is_left = left()
        if not _is_traced(is_left):
            if is_left:
                break
            body(item)
            continue
        _require_list(iterated)
        state = State((body,))
        choose(is_left, lambda: None, lambda item=item: body(item), state, "the `for`")


def _require_list(iterated: Any) -> None:
    """Refuse a traced ``break`` out of an iterator: what is left would depend on it."""
    if is_iterator(iterated):
        raise ControlFlowError(
            f"an iterator is left by a `break` or `return` at {user_line()}, "
            "which is only known when the program runs",
            got=f"a {type(iterated).__name__}, of which the items that are left "
            "would depend on it",
            fix="loop over a list, such as list(items)",
        )


@dataclass(frozen=True)
class TracedRange:
    """A ``range`` whose length is known when the program runs."""

    start: Any
    step: Any
    length: Any

    def _unknown(self, *_: Any) -> NoReturn:
        raise ControlFlowError(
            f"the number of iterations is not known at {user_line()}",
            got=f"a range of {describe(self.length)}, which is traced",
            fix="write `for i in range(n)`, which can be a loop of the program",
        )

    __iter__ = __len__ = __reversed__ = __getitem__ = __contains__ = _unknown


def range_(*bounds: Any) -> Any:
    """``range``, of traced numbers too."""
    if not any(map(_is_traced, bounds)):
        return range(*bounds)
    defaults = {1: (0, *bounds, 1), 2: (*bounds, 1)}
    start, stop, step = defaults.get(len(bounds), bounds)
    for bound in (start, stop, step):
        if jnp.ndim(bound) or not jnp.issubdtype(jax.typeof(bound).dtype, jnp.integer):
            raise ControlFlowError(
                f"range at {user_line()} takes whole numbers",
                got=describe(bound),
                fix="cast it, e.g. with .astype(jnp.int32)",
            )
    return TracedRange(start, step, jnp.maximum(-((start - stop) // step), 0))


def _for_range(
    items: TracedRange, left: Callable[[], Any], body: Callable[[Any], None]
) -> None:
    """A ``for`` over a traced range, as a ``while`` that counts."""
    index, going = CellType(0), CellType(items.length > 0)

    def turn() -> None:
        count = index.cell_contents
        # As a number of Python, it takes the dtype of what it is computed with.
        body(traces.as_number(items.start + count * items.step, int))
        index.cell_contents = count + 1
        going.cell_contents = (count + 1 < items.length) & jnp.logical_not(left())

    state = State((left, body), {_GOING: going, "the index": index})
    _while_loop(turn, state, f"the `for` at {user_line()}")


# --- loops in the program


@dataclass(frozen=True)
class _Iteration:
    """One iteration of a loop as a program.

    Attributes:
      block: Its inputs are the carry.
      merged: The changed variables and entries, with slots for the carry.
      merge: Of their values before the loop and after an iteration.
    """

    block: Block
    merged: Mapping[Key, Any]
    merge: Merge

    def initial(self) -> list[Any]:
        """The initial carry."""
        return [each.cast(each.first, each.second) for each in self.merge.numbers]

    def carry_structure(self) -> tuple[Any, ...]:
        """The types of the carry, and the variables and entries that it fills."""
        places = {
            key: value.form() if isinstance(value, Merged) else type(value)
            for key, value in self.merged.items()
        }
        return places, [jax.typeof(value) for value in self.initial()]

    def run(self, values: Sequence[Any]) -> list[Any]:
        """The carry after an iteration."""
        outputs = jaxprs.evaluate(self.block.program, *values)
        return [
            each.cast(self.block.value(each.second, outputs), each.first)
            for each in self.merge.numbers
        ]


def _while_loop(turn: Callable[[], None], state: State, what: str) -> None:
    """``jax.lax.while_loop``, for as long as the first variable of the state says."""
    before = state.read()
    iteration = _fixed_point(turn, state, what)
    going = iteration.merged.get(Key(0, VALUE))

    def should_continue(values: Sequence[Any]) -> Any:
        slot = going.leaves[0] if isinstance(going, Merged) else None
        return values[slot.number] if isinstance(slot, Slot) else before[0][VALUE]

    results = jax.lax.while_loop(should_continue, iteration.run, iteration.initial())
    state.write(state.updated(before, filled(iteration.merged, results)))


def _fixed_point(turn: Callable[[], None], state: State, what: str) -> _Iteration:
    """Trace iterations until the types of the carry no longer change."""
    iteration, here = None, scope.current()
    for _ in range(_MAX_TRIALS):
        mark = None if here is None else here.snapshot()
        last, iteration = iteration, _trace_iteration(turn, state, what, iteration)
        if last is not None and last.carry_structure() == iteration.carry_structure():
            return iteration
        if here is not None and mark is not None:
            here.restore(mark)
    raise AssertionError("the types that a loop carries do not settle")


def _trace_iteration(
    turn: Callable[[], None], state: State, what: str, last: _Iteration | None
) -> _Iteration:
    """Trace one iteration with the carry that the last run found."""
    before = state.read()

    def run(*carried: Any) -> None:
        values = filled(last.merged if last else {}, carried)
        # A variable without a value before has none as an iteration begins.
        unset = {key: state.value(before, key) for key in values}
        unset = {key: value for key, value in unset.items() if _is_unset(value)}
        state.write(state.updated(before, values | unset))
        turn()

    inputs = [jaxprs.struct(jax.typeof(v)) for v in (last.initial() if last else [])]
    block = traced_block(run, state, before, what, inputs=inputs)
    ways = ("before", "after an iteration")
    merge = Merge(what, ways, state, "another type after")
    first, second = (state.trees(each, block.changes) for each in (before, block.end))
    merged = {key: merge.merged(key, first[key], second[key]) for key in block.changes}
    merge.require_agreement()
    return _Iteration(block, merged, merge)


def _is_unset(value: Any) -> bool:
    return value is ABSENT or isinstance(value, Unusable)
