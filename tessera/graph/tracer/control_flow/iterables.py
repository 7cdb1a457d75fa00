# SPDX-License-Identifier: Apache-2.0
"""What a traced loop iterates over: ranges and rows of arrays, enumerated or zipped."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from tessera.errors import ControlFlowError
from tessera.graph.tracer.control_flow.merge_points import describe
from tessera.graph.tracer.control_flow.user_code import user_line
from tessera.jax_compat import jaxprs, traces


@dataclass(frozen=True)
class Items:
    """What a traced loop iterates over: a range, or rows of arrays.

    Attributes:
      length: How many there are; a traced number where only the program knows.
      rows: Arrays of which each iteration takes one row.
      item: Makes the item of an iteration from its index and rows.
    """

    length: Any
    rows: tuple[Any, ...]
    item: Callable[[Any, Sequence[Any]], Any]

    def __iter__(self) -> Iterator[Any]:
        """The items one after the other, if the length is known."""
        if isinstance(self.length, jaxprs.Tracer):
            raise ControlFlowError(
                f"the number of iterations is not known at {user_line()}",
                got=f"a range of {describe(self.length)}, which is traced",
                fix="write a `for` statement, which can be a loop of the program",
            )
        for index in range(self.length):
            yield self.item(index, [row[index] for row in self.rows])


class OwnIterator:
    """An iterator that nothing but its loop can continue, as ``enumerate(rows)``."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator

    def __iter__(self) -> Iterator[Any]:
        """The iterator."""
        return self._iterator


def items_of(value: Any) -> Items | None:
    """The rows of a traced array as items; None for other values."""
    if isinstance(value, Items):
        return value
    if isinstance(value, jaxprs.Tracer) and value.ndim:
        return Items(value.shape[0], (value,), lambda _, rows: rows[0])
    return None


def range_(*bounds: Any) -> Any:
    """``range``, of traced numbers too."""
    if not any(isinstance(bound, jaxprs.Tracer) for bound in bounds):
        return range(*bounds)
    start, stop, step = {
        1: (0, *bounds, 1),
        2: (*bounds, 1),
    }.get(len(bounds), bounds)
    for bound in (start, stop, step):
        if jnp.ndim(bound) or not jnp.issubdtype(jax.typeof(bound).dtype, jnp.integer):
            raise ControlFlowError(
                f"range at {user_line()} takes whole numbers",
                got=describe(bound),
                fix="cast it, e.g. with .astype(jnp.int32)",
            )

    def item(index: Any, _: Sequence[Any]) -> Any:
        # As a number of Python, it takes the dtype of what it is computed with.
        return traces.as_number(start + index * step, int)

    return Items(jnp.maximum(-((start - stop) // step), 0), (), item)


def enumerate_(value: Any, start: Any = 0) -> Any:
    """``enumerate``, of traced things too."""
    items = items_of(value)
    if items is None:
        return enumerate(value, start)
    return Items(
        items.length,
        items.rows,
        lambda index, rows: (start + index, items.item(index, rows)),
    )


def reversed_(value: Any) -> Any:
    """``reversed``, of traced things too."""
    items = items_of(value)
    if items is None:
        return reversed(value)
    last = items.length - 1
    rows = tuple(row[::-1] for row in items.rows)
    return Items(items.length, rows, lambda index, own: items.item(last - index, own))


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

    def item(index: Any, rows: Sequence[Any]) -> tuple[Any, ...]:
        rest, found = list(rows), list[Any]()
        for part in known:
            own, rest = rest[: len(part.rows)], rest[len(part.rows) :]
            found.append(part.item(index, own))
        return tuple(found)

    return Items(
        length, tuple(row[:length] for part in known for row in part.rows), item
    )


def _is_traced(value: Any) -> bool:
    return isinstance(value, jaxprs.Tracer)
