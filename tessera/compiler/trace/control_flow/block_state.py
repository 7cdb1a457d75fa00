# SPDX-License-Identifier: Apache-2.0
"""What a block of code can change, read before and after it, and put back.

A branch or a loop's body is traced by running it. What it changed is found by
comparing this state before and after, and is then undone: what the traced program
computes takes its place.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from tessera.compiler.trace.control_flow.active_conversion import RETURNED_NAME, current
from tessera.compiler.trace.control_flow.containers import Side
from tessera.compiler.trace.control_flow.lower_jumps import PREFIX, RESULT
from tessera.compiler.trace.control_flow.mutable_places import (
    Entries,
    Holder,
    Items,
    is_iterator,
)
from tessera.compiler.trace.control_flow.reachability import Reach

ABSENT: Final = object()  # what an entry has that is not there


class Undefined:
    """A variable without a value; reading it is Python's own error."""

    def __init__(self, name: str) -> None:
        self.name = name

    def read(self) -> Any:
        """Raise, as Python would."""
        raise UnboundLocalError(
            f"cannot access local variable {self.name!r} where it is not associated "
            "with a value"
        )

    def _used(self, *_: Any) -> Any:
        return self.read()

    # Code that is not converted, such as a generator's, would take it for a value.
    __bool__ = __call__ = __iter__ = __len__ = __getitem__ = __neg__ = _used
    __add__ = __sub__ = __mul__ = __truediv__ = __matmul__ = __pow__ = _used
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rmatmul__ = __rpow__ = _used
    __lt__ = __le__ = __gt__ = __ge__ = __float__ = __int__ = __index__ = _used


class NotReturned:
    """What a function returns that has not returned yet."""


@dataclass(frozen=True)
class Key:
    """One place that has a value: a variable, or an entry of a holder."""

    holder: int  # 0 for variables, else the holder's number
    entry: Any
    name: str

    def __hash__(self) -> int:
        return hash((self.holder, self.entry))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and (self.holder, self.entry) == (
            other.holder,
            other.entry,
        )


class State:
    """The variables of a block, and everything else that its code can change.

    Args:
      names: Its variables.
      get: Reads them all.
      put: Writes them all.
      functions: The functions that are its code.
    """

    def __init__(
        self,
        names: Sequence[str],
        get: Callable[[], tuple[Any, ...]],
        put: Callable[[tuple[Any, ...]], None],
        functions: Sequence[Callable[..., Any] | None],
    ) -> None:
        self.names, self._get, self._put = tuple(names), get, put
        conversion = current()
        outside = conversion.outside if conversion else {}
        values = [
            (spoken(name), value) for name, value in zip(names, get(), strict=True)
        ]
        reach = Reach([each for each in functions if each], values, outside)
        own = set(map(id, getattr(get, "__closure__", None) or ()))
        self._holders = [h for h in reach.holders if id(h.thing) not in own]
        self._arrays = reach.arrays
        self._things = {id(holder.thing) for holder in self._holders}
        self._things |= {id(array) for array in self._arrays}

    @property
    def has_iterators(self) -> bool:
        """Whether the code can move on an iterator that was there before."""
        return any(is_iterator(holder.thing) for holder in self._holders)

    def holds(self, thing: Any) -> bool:
        """Whether a thing was there before the block."""
        conversion = current()
        is_outside = conversion is not None and id(thing) in conversion.outside
        return is_outside or id(thing) in self._things

    def read(self) -> dict[Key, Any]:
        """Every place and its value."""
        values = {
            Key(0, name, spoken(name)): value
            for name, value in zip(self.names, self._get(), strict=True)
        }
        for number, holder in enumerate(self._holders, start=1):
            for entry, value in holder.content().items():
                values[Key(number, entry, holder.entry_name(entry))] = value
        return values

    def write(self, values: dict[Key, Any]) -> None:
        """Give every place its value; entries that are not among them go."""
        self._put(tuple(values[Key(0, name, name)] for name in self.names))
        contents: list[dict[Any, Any]] = [{} for _ in self._holders]
        for key, value in values.items():
            if key.holder:
                contents[key.holder - 1][key.entry] = value
        for holder, content in zip(self._holders, contents, strict=True):
            holder.fill(content)

    def side(self, values: dict[Key, Any], changed: Iterable[Key] = ()) -> Side:
        """What containers hold in some reading of the state, and what else changed."""
        found: dict[int, dict[Any, Any]] = {
            id(holder.thing): {} for holder in self._holders if _has_parts(holder)
        }
        for key, value in values.items():
            holder = self.holder(key)
            if holder is not None and _has_parts(holder):
                found[id(holder.thing)][key.entry] = value
        others = filter(None, map(self.holder, changed))
        return Side(found, frozenset(id(h.thing) for h in others if not _has_parts(h)))

    def holder(self, key: Key) -> Holder | None:
        """What a place is an entry of; None of a variable."""
        return self._holders[key.holder - 1] if key.holder else None

    @contextmanager
    def arrays_locked(self) -> Iterator[None]:
        """Let NumPy refuse to write into arrays that were there before."""
        locked = [array for array in self._arrays if array.flags.writeable]
        for array in locked:
            array.flags.writeable = False
        try:
            yield
        finally:
            for array in sorted(
                locked, key=_depth
            ):  # a view after what it is a view of
                array.flags.writeable = True


def _has_parts(holder: Holder) -> bool:
    return isinstance(holder, (Entries, Items))


def _depth(array: Any) -> int:
    return 1 + _depth(array.base) if isinstance(array, np.ndarray) else 0


def spoken(name: str) -> str:
    """What a variable is called in messages."""
    if name == RESULT:
        return RETURNED_NAME
    if name.startswith(PREFIX):
        return "whether to go on"
    return name
