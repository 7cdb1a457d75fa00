# SPDX-License-Identifier: Apache-2.0
"""``while`` and ``for`` over what is only known when the program runs.

``while`` on a traced condition and ``for`` over ``range`` of traced numbers become
``jax.lax.while_loop``; ``for`` over the leading dim of an array, whose length is known,
becomes ``jax.lax.scan``, which can be differentiated. Loops over what Python knows are
run by Python, and their turns stand in the program one after the other.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from tessera import _jax, _jax_traces, scope
from tessera.errors import BranchError, ControlFlowError
from tessera.graph.tracing.control_flow.blocks import (
    ABSENT,
    Block,
    Meeting,
    Merge,
    described,
    traced_block,
    truth,
    user_line,
    with_results,
)
from tessera.graph.tracing.control_flow.branches import if_stmt
from tessera.graph.tracing.control_flow.state import (
    Key,
    NotReturned,
    State,
    Undefined,
)

Get = Callable[[], tuple[Any, ...]]
Put = Callable[[tuple[Any, ...]], None]

# What a turn raises that cannot be the same program for every row.
_NO_LOOP = (
    BranchError,
    ControlFlowError,
    LookupError,
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)

# Each trial finds places that a turn changes because of what the one before found.
_MOST_TRIALS = 8


# --- what a loop may go over


@dataclass(frozen=True)
class Items:
    """What a traced loop goes over: a range, rows of arrays, or these numbered.

    Attributes:
      length: How many there are; a traced number where only the program knows.
      rows: Arrays of which each turn has one row.
      item: Makes a turn's item from its number and rows.
    """

    length: Any
    rows: tuple[Any, ...]
    item: Callable[[Any, Sequence[Any]], Any]

    def __iter__(self) -> Iterator[Any]:
        """The items one after the other, where their number is known."""
        if isinstance(self.length, _jax.Tracer):
            raise ControlFlowError(
                f"how often this goes round is not known, at {user_line()}",
                got=f"a range of {described(self.length)}, which is traced",
                fix="write a `for` statement, which can be a loop of the program",
            )
        for place in range(self.length):
            yield self.item(place, [row[place] for row in self.rows])


def items_of(value: Any) -> Items | None:
    """A traced array's rows as what a loop goes over; None for other things."""
    if isinstance(value, Items):
        return value
    if isinstance(value, _jax.Tracer) and value.ndim:
        return Items(value.shape[0], (value,), lambda _, rows: rows[0])
    return None


def range_(*bounds: Any) -> Any:
    """``range``, of traced numbers too."""
    if not any(isinstance(bound, _jax.Tracer) for bound in bounds):
        return range(*bounds)
    start, stop, step = {
        1: (0, *bounds, 1),
        2: (*bounds, 1),
    }.get(len(bounds), bounds)
    for bound in (start, stop, step):
        if jnp.ndim(bound) or not jnp.issubdtype(jax.typeof(bound).dtype, jnp.integer):
            raise ControlFlowError(
                f"range at {user_line()} takes whole numbers",
                got=described(bound),
                fix="cast it, e.g. with .astype(jnp.int32)",
            )

    def item(place: Any, _: Sequence[Any]) -> Any:
        # As a number of Python, it takes the dtype of what it is computed with.
        return _jax_traces.as_number(start + place * step, int)

    return Items(jnp.maximum(-((start - stop) // step), 0), (), item)


def enumerate_(value: Any, start: Any = 0) -> Any:
    """``enumerate``, of traced things too."""
    items = items_of(value)
    if items is None:
        return enumerate(value, start)
    return Items(
        items.length,
        items.rows,
        lambda place, rows: (start + place, items.item(place, rows)),
    )


def reversed_(value: Any) -> Any:
    """``reversed``, of traced things too."""
    items = items_of(value)
    if items is None:
        return reversed(value)
    last = items.length - 1
    rows = tuple(row[::-1] for row in items.rows)
    return Items(items.length, rows, lambda place, own: items.item(last - place, own))


def len_(value: Any) -> Any:
    """``len``; of a traced range, a traced number."""
    return value.length if isinstance(value, Items) else len(value)


def zip_(*values: Any, strict: bool = False) -> Any:
    """``zip``, of the rows of traced arrays too."""
    parts = [items_of(value) for value in values]
    known = [part for part in parts if part and not _is_traced(part.length)]
    if not parts or len(known) < len(parts):
        return zip(*values, strict=strict)
    lengths = {part.length for part in known}
    if strict and len(lengths) > 1:
        raise ValueError(f"zip() arguments have lengths {sorted(lengths)}")
    length = min(lengths)

    def item(place: Any, rows: Sequence[Any]) -> tuple[Any, ...]:
        rest, found = list(rows), list[Any]()
        for part in known:
            own, rest = rest[: len(part.rows)], rest[len(part.rows) :]
            found.append(part.item(place, own))
        return tuple(found)

    return Items(
        length, tuple(row[:length] for part in known for row in part.rows), item
    )


def _is_traced(value: Any) -> bool:
    return isinstance(value, _jax.Tracer)


# --- the statements


def while_stmt(
    test: Callable[[], Any],
    body: Callable[[], None],
    get: Get,
    put: Put,
    names: Sequence[str],
    options: Mapping[str, Any],
) -> None:
    """A ``while``: Python's own until its condition is traced."""
    del options
    while not _is_traced(holds := test()):
        if not holds:
            return
        body()
    state = State(names, get, put, (test, body))
    _Loop(state, "the `while`", lambda _: body(), test).run_while()


def for_stmt(
    iterated: Any,
    extra_test: Callable[[], Any] | None,
    body: Callable[[Any], None],
    get: Get,
    put: Put,
    names: Sequence[str],
    options: Mapping[str, Any],
) -> None:
    """A ``for``; ``extra_test`` is whether no ``break`` or ``return`` was met."""
    del options

    def guarded(item: Any) -> None:
        goes_on = True if extra_test is None else extra_test()
        if_stmt(goes_on, lambda: body(item), lambda: None, get, put, names, len(names))

    items = items_of(iterated)
    if items is None:
        _unrolled(iterated, extra_test, guarded)
        return
    state = State(names, get, put, (extra_test, body))
    if _is_traced(items.length):
        _Loop(state, "the `for`", body, extra_test, items).run_while()
        return
    before = state.read()
    # A turn may be no program of its own, such as one that fills a list. Python runs
    # it then, and raises what is to be raised.
    with contextlib.suppress(*_NO_LOOP):
        _Loop(state, "the `for`", guarded, None, items).run_scan()
        return
    state.write(before)
    _unrolled(items, extra_test, guarded)


def _unrolled(
    items: Any, extra_test: Callable[[], Any] | None, turn: Callable[[Any], None]
) -> None:
    for item in items:
        if extra_test is not None:
            goes_on = extra_test()
            if not _is_traced(goes_on) and not goes_on:
                break
        turn(item)


# --- loops in the program


@dataclass(frozen=True)
class _Turn:
    """One turn of a loop as a program.

    Attributes:
      block: Its inputs are the turn's number, the rows, and what is carried.
      merged: What the places hold from turn to turn, with slots for what is carried.
      meetings: What is carried: as it is before the loop, and after a turn.
    """

    block: Block
    merged: dict[Key, Any]
    meetings: list[Meeting]

    def initial(self) -> list[Any]:
        """What is carried into the first turn."""
        return [each.cast(each.first, each.second) for each in self.meetings]

    def carries(self) -> tuple[Any, ...]:
        """The types of what is carried, and where it is put."""
        places = {key: jax.tree.structure(value) for key, value in self.merged.items()}
        return places, [jax.typeof(value) for value in self.initial()]

    def run(self, place: Any, rows: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """What is carried out of a turn."""
        outputs = _jax.evaluate(self.block.program, place, *rows, *values)
        return [
            each.cast(self.block.value(each.second, outputs), each.first)
            for each in self.meetings
        ]


class _Loop:
    """One loop; the places that its turns change are carried from turn to turn."""

    def __init__(
        self,
        state: State,
        what: str,
        body: Callable[[Any], None],
        test: Callable[[], Any] | None,
        items: Items | None = None,
    ) -> None:
        self._state, self._what = state, f"{what} at {user_line()}"
        self._body, self._test, self._items = body, test, items
        self._rows = () if items is None else items.rows
        self._before = state.read()

    def run_while(self) -> None:
        """As ``jax.lax.while_loop``."""
        turn = self._turn(ends_defined=False)
        test = None if self._test is None else self._traced_test(self._test, turn)
        length = None if self._items is None else self._items.length

        def goes_on(carry: tuple[Any, list[Any]]) -> Any:
            place, values = carry
            within = True if length is None else place < length
            if test is None:
                return within
            (holds,) = _jax.evaluate(test, *values)
            return holds if within is True else jnp.logical_and(within, holds)

        def step(carry: tuple[Any, list[Any]]) -> tuple[Any, list[Any]]:
            place, values = carry
            return place + 1, turn.run(place, [], values)

        _, results = jax.lax.while_loop(goes_on, step, (0, turn.initial()))
        self._leave(turn, results)

    def run_scan(self) -> None:
        """As ``jax.lax.scan``."""
        assert self._items is not None, "a scan goes over items"
        turn = self._turn(ends_defined=self._items.length > 0)

        def step(carry: tuple[Any, list[Any]], rows: Any) -> tuple[Any, None]:
            place, values = carry
            return (place + 1, turn.run(place, rows, values)), None

        (_, results), _ = jax.lax.scan(
            step, (0, turn.initial()), list(self._rows), length=self._items.length
        )
        self._leave(turn, results)

    def _leave(self, turn: _Turn, results: Sequence[Any]) -> None:
        self._state.write(with_results(self._before, turn.merged, results))

    def _turn(self, *, ends_defined: bool) -> _Turn:
        """One turn, which gives back what it is given in the same types."""
        turn, here = None, scope.current()
        for _ in range(_MOST_TRIALS):
            mark = None if here is None else (here.mark(), here.backward_calls)
            last, turn = turn, self._trial(turn, ends_defined)
            if last is not None and last.carries() == turn.carries():
                return turn
            if here is not None and mark is not None:
                here.go_back(mark[0])
                here.backward_calls = mark[1]
        raise AssertionError("the types that a loop carries do not settle")

    def _trial(self, last: _Turn | None, ends_defined: bool) -> _Turn:
        """One turn that is given what the last trial found to be carried."""
        given = [] if last is None else last.initial()
        rows = [jax.eval_shape(lambda row=row: row[0]) for row in self._rows]

        def run(place: Any, *values: Any) -> None:
            own, carried = values[: len(rows)], values[len(rows) :]
            self._enter(last, carried)
            items = self._items
            self._body(None if items is None else items.item(place, own))

        inputs = [jax.typeof(0), *rows, *map(jax.typeof, given)]
        structs = [_jax.struct(each) for each in inputs]
        block = traced_block(run, self._state, self._before, self._what, inputs=structs)
        return self._merged(block, ends_defined)

    def _merged(self, block: Block, ends_defined: bool) -> _Turn:
        merge = Merge(self._what, ("before", "after a turn"), "another type after")
        merged: dict[Key, Any] = {}
        for key, after in block.after.items():
            before = self._before.get(key, ABSENT)
            if isinstance(before, Undefined) and ends_defined:
                before = NotReturned()  # every turn begins without it
            merged[key] = merge.value(key.name, before, after)
        merge.require_agreement()
        return _Turn(block, merged, merge.meetings)

    def _enter(self, last: _Turn | None, carried: Sequence[Any]) -> None:
        """Put what is carried where it is found at the beginning of a turn."""
        merged = {} if last is None else last.merged
        given = with_results(self._before, merged, carried)
        undefined = {
            key: value
            for key, value in self._before.items()
            if isinstance(value, Undefined)
        }
        self._state.write(given | undefined)

    def _traced_test(self, test: Callable[[], Any], turn: _Turn) -> _jax.Program:
        """Whether there is another turn, as a program of what is carried."""

        def run(*carried: Any) -> Any:
            self._enter(turn, carried)
            return truth(jnp.asarray(test()), self._what)

        structs = [_jax.struct(jax.typeof(value)) for value in turn.initial()]
        try:
            return jax.make_jaxpr(run)(*structs)
        finally:
            self._state.write(self._before)
