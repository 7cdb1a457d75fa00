# SPDX-License-Identifier: Apache-2.0
"""``while`` and ``for`` on traced values: ``while_loop``, ``scan``, or unrolled.

``while`` on a traced condition and ``for`` over ``range`` of traced numbers become
``jax.lax.while_loop``; ``for`` over the leading dim of an array, whose length is known,
becomes ``jax.lax.scan``, which can be differentiated. Loops over what Python knows are
run by Python, so the program has their iterations one after the other.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import CellType
from typing import Any

import jax
import jax.numpy as jnp

from tessera.errors import BranchError, ControlFlowError
from tessera.graph.tracer.control_flow.active_conversion import (
    NEEDS_VALUE,
    Ambiguous,
    current,
)
from tessera.graph.tracer.control_flow.block_state import (
    ABSENT,
    Key,
    NotReturned,
    State,
    Unusable,
)
from tessera.graph.tracer.control_flow.branches import choose
from tessera.graph.tracer.control_flow.iterables import Items, items_of
from tessera.graph.tracer.control_flow.merge_points import (
    Merge,
    MergedContainer,
    MergeResult,
    Slot,
)
from tessera.graph.tracer.control_flow.mutable_objects import is_iterator
from tessera.graph.tracer.control_flow.traced_blocks import Block, traced_block, truth
from tessera.graph.tracer.control_flow.user_code import user_line
from tessera.jax_compat import jaxprs
from tessera.tracing import scope

# Exceptions of an iteration that is not the same program for every row.
_NO_LOOP = (BranchError, ControlFlowError, LookupError, *NEEDS_VALUE)

# Each run may find more that an iteration changes, because of the one before.
_MAX_TRIALS = 8


def while_stmt(test: Callable[[], Any], body: Callable[[], None]) -> None:
    """A ``while``: Python's own until its condition is traced."""
    while not _is_traced(holds := test()):
        if not holds:
            return
        body()
    _run_while("the `while`", holds, test, lambda _: body(), (test, body))


def _run_while(
    what: str,
    holds: Any,
    test: Callable[[], Any] | None,
    body: Callable[[Any], None],
    functions: Sequence[Callable[..., Any] | None],
    items: Items | None = None,
) -> None:
    """A ``while_loop`` of the program; each iteration ends with the condition."""
    going = CellType(truth(jnp.asarray(holds), what))

    def turn(item: Any) -> None:
        body(item)
        if test is not None:
            going.cell_contents = truth(jnp.asarray(test()), what)

    state = State(functions, values=[("whether to go on", going)])
    _Loop(state, what, turn, items).run_while(going)


def for_stmt(
    iterated: Any,
    extra_test: Callable[[], Any] | None,
    body: Callable[[Any], None],
) -> None:
    """A ``for``; ``extra_test`` is whether no ``break`` or ``return`` was met."""

    def guarded(item: Any) -> None:
        should_continue = True if extra_test is None else extra_test()
        if _is_traced(should_continue):
            state = State((body,), values=[("the item", item)])
            where = "the `for`"
            choose(should_continue, lambda: body(item), lambda: None, state, where)
        elif should_continue:
            body(item)

    items = items_of(iterated)
    if items is None:
        _unrolled(iterated, extra_test, guarded)
        return
    if _is_traced(items.length):
        functions = extra_test, body
        _run_while("the `for`", True, extra_test, body, functions, items)
        return
    state = State((extra_test, body))
    # An iteration that appends to a list, say, is no program of its own. Then the loop
    # is unrolled, and Python raises its own errors.
    with contextlib.suppress(*_NO_LOOP), _attempt(state):
        _Loop(state, "the `for`", guarded, items).run_scan()
        return
    _unrolled(items, extra_test, guarded)


@contextlib.contextmanager
def _attempt(state: State) -> Iterator[None]:
    """Undo what is done inside, if it ends with an exception."""
    conversion, before = current(), state.read()
    try:
        with contextlib.nullcontext() if conversion is None else conversion.attempt():
            yield
    except Exception:
        state.write(before)
        raise


def _unrolled(
    items: Any, extra_test: Callable[[], Any] | None, iteration: Callable[[Any], None]
) -> None:
    """Iterate in Python; an iteration after a traced ``break`` is a branch."""
    for item in items:
        if extra_test is not None:
            should_continue = extra_test()
            if _is_traced(should_continue) and is_iterator(items):
                raise ControlFlowError(
                    f"an iterator is left by a `break` or `return` at {user_line()}, "
                    "which is only known when the program runs",
                    got=f"a {type(items).__name__}, of which the items that are left "
                    "would depend on it",
                    fix="loop over a list, such as list(items)",
                )
            if not _is_traced(should_continue) and not should_continue:
                break
        iteration(item)


def _is_traced(value: Any) -> bool:
    return isinstance(value, jaxprs.Tracer)


# --- loops in the program


@dataclass(frozen=True)
class _Iteration:
    """One iteration of a loop as a program.

    Attributes:
      block: Its inputs are the iteration's index, the rows, and the carry.
      merged: The changed variables and entries, with slots for the carry.
      merge: Of their values before the loop and after an iteration.
    """

    block: Block
    merged: dict[Key, Any]
    merge: Merge

    def initial(self) -> list[Any]:
        """The initial carry."""
        return [each.cast(each.first, each.second) for each in self.merge.numbers]

    def carry_structure(self) -> tuple[Any, ...]:
        """The types of the carry, and the variables and entries that it fills."""
        places = {
            key: value.structure()
            if isinstance(value, MergedContainer)
            else type(value)
            for key, value in self.merged.items()
        }
        return places, [jax.typeof(value) for value in self.initial()]

    def run(self, index: Any, rows: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """The carry after an iteration."""
        outputs = jaxprs.evaluate(self.block.program, index, *rows, *values)
        return [
            each.cast(self.block.value(each.second, outputs), each.first)
            for each in self.merge.numbers
        ]


class _Loop:
    """One loop; what an iteration changes is its carry."""

    def __init__(
        self,
        state: State,
        what: str,
        body: Callable[[Any], None],
        items: Items | None = None,
    ) -> None:
        self._state, self._what = state, f"{what} at {user_line()}"
        self._body, self._items = body, items
        self._rows = () if items is None else items.rows
        self._before = state.read()

    def run_while(self, going: CellType) -> None:
        """As ``jax.lax.while_loop``, for as long as a variable says."""
        before = going.cell_contents
        iteration = self._fixed_point(runs_at_least_once=False)
        length = None if self._items is None else self._items.length
        (slot,) = [
            value
            for key, value in iteration.merged.items()
            if self._state.owner(key).target is going
        ] or [None]

        def should_continue(carry: tuple[Any, list[Any]]) -> Any:
            index, values = carry
            holds = values[slot.number] if isinstance(slot, Slot) else before
            return holds if length is None else jnp.logical_and(index < length, holds)

        def step(carry: tuple[Any, list[Any]]) -> tuple[Any, list[Any]]:
            index, values = carry
            return index + 1, iteration.run(index, [], values)

        _, results = jax.lax.while_loop(should_continue, step, (0, iteration.initial()))
        self._write_results(iteration, results)

    def run_scan(self) -> None:
        """As ``jax.lax.scan``."""
        assert self._items is not None, "a scan goes over items"
        iteration = self._fixed_point(runs_at_least_once=self._items.length > 0)

        def step(carry: tuple[Any, list[Any]], rows: Any) -> tuple[Any, None]:
            index, values = carry
            return (index + 1, iteration.run(index, rows, values)), None

        (_, results), _ = jax.lax.scan(
            step, (0, iteration.initial()), list(self._rows), length=self._items.length
        )
        self._write_results(iteration, results)

    def _write_results(self, iteration: _Iteration, results: Sequence[Any]) -> None:
        filled = MergeResult(self._before, iteration.merged, results)
        self._state.write(filled.values)
        iteration.merge.record_ambiguous(filled)

    def _fixed_point(self, *, runs_at_least_once: bool) -> _Iteration:
        """Trace iterations until the types of the carry no longer change."""
        iteration, here = None, scope.current()
        for _ in range(_MAX_TRIALS):
            mark = None if here is None else here.snapshot()
            last, iteration = (
                iteration,
                self._trace_iteration(iteration, runs_at_least_once),
            )
            if (
                last is not None
                and last.carry_structure() == iteration.carry_structure()
            ):
                return iteration
            if here is not None and mark is not None:
                here.restore(mark)
        raise AssertionError("the types that a loop carries do not settle")

    def _trace_iteration(
        self, last: _Iteration | None, runs_at_least_once: bool
    ) -> _Iteration:
        """Trace one iteration with the carry that the last run found."""
        given = [] if last is None else last.initial()
        rows = [jax.eval_shape(lambda row=row: row[0]) for row in self._rows]

        def run(index: Any, *values: Any) -> None:
            own, carried = values[: len(rows)], values[len(rows) :]
            doubtful = self._write_carried(last, carried)
            items = self._items
            self._body(None if items is None else items.item(index, own))
            for each in doubtful:
                each.check()

        inputs = [jax.typeof(0), *rows, *map(jax.typeof, given)]
        structs = [jaxprs.struct(each) for each in inputs]
        block = traced_block(run, self._state, self._before, self._what, inputs=structs)
        return self._merged(block, runs_at_least_once)

    def _merged(self, block: Block, runs_at_least_once: bool) -> _Iteration:
        branch_contents = self._state.side(self._before), block.side
        ways = ("before", "after an iteration")
        merge = Merge(
            self._what, ways, self._state, branch_contents, "another type after"
        )
        merged: dict[Key, Any] = {}
        for key, after in block.after.items():
            before = self._before.get(key, ABSENT)
            if runs_at_least_once and self._is_unset(key):
                before = NotReturned()  # every iteration begins without it
            merged[key] = merge.merged(key, before, after)
        merge.require_agreement()
        return _Iteration(block, merged, merge)

    def _write_carried(
        self, last: _Iteration | None, carried: Sequence[Any]
    ) -> list[Ambiguous]:
        """Write the carry to its variables and entries, as an iteration begins.

        Returns:
          What the iteration must not mutate: see ``Ambiguous``.
        """
        filled = MergeResult(self._before, {} if last is None else last.merged, carried)
        values = {k: v for k, v in filled.values.items() if not self._is_unset(k)}
        unset = {k: v for k, v in self._before.items() if self._is_unset(k)}
        self._state.write(values | unset)
        made = filled.ambiguous
        return [Ambiguous.now(value, name, self._what) for value, name in made]

    def _is_unset(self, key: Key) -> bool:
        """Whether a key is a variable without a value before the loop."""
        before = self._before.get(key, ABSENT)
        is_missing = before is ABSENT or isinstance(before, Unusable)
        return is_missing and self._state.is_variable(key)
