# SPDX-License-Identifier: Apache-2.0
"""The state that a block of code can change: read before and after it, then restored.

A branch or a loop's body is traced by running it. What it changed is found by
comparing this state before and after, and is then undone: the outputs of the
traced program take its place.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from tessera.compiler.trace.control_flow.active_conversion import (
    RETURN_VALUE_NAME,
    current,
)
from tessera.compiler.trace.control_flow.containers import BranchContents
from tessera.compiler.trace.control_flow.lower_jumps import PREFIX, RESULT
from tessera.compiler.trace.control_flow.mutable_objects import (
    DictEntries,
    ListItems,
    MutableObject,
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
    """The result of a function that has not returned yet."""


@dataclass(frozen=True)
class Key:
    """One variable, or one entry of a mutable object."""

    owner: int  # 0 for variables, else the number of the mutable object
    entry: Any
    name: str

    def __hash__(self) -> int:
        return hash((self.owner, self.entry))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and (self.owner, self.entry) == (
            other.owner,
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
            (display_name(name), value)
            for name, value in zip(names, get(), strict=True)
        ]
        reach = Reach([each for each in functions if each], values, outside)
        own = set(map(id, getattr(get, "__closure__", None) or ()))
        self._mutable_objects = [
            h for h in reach.mutable_objects if id(h.target) not in own
        ]
        self._arrays = reach.arrays
        self._ids = {id(owner.target) for owner in self._mutable_objects}
        self._ids |= {id(array) for array in self._arrays}

    @property
    def has_iterators(self) -> bool:
        """Whether the code can advance an iterator that existed before."""
        return any(is_iterator(owner.target) for owner in self._mutable_objects)

    def holds(self, target: Any) -> bool:
        """Whether an object existed before the block."""
        conversion = current()
        is_outside = conversion is not None and id(target) in conversion.outside
        return is_outside or id(target) in self._ids

    def read(self) -> dict[Key, Any]:
        """The value of every variable and entry."""
        values = {
            Key(0, name, display_name(name)): value
            for name, value in zip(self.names, self._get(), strict=True)
        }
        for number, owner in enumerate(self._mutable_objects, start=1):
            for entry, value in owner.content().items():
                values[Key(number, entry, owner.entry_name(entry))] = value
        return values

    def write(self, values: dict[Key, Any]) -> None:
        """Set every variable and entry; entries without a value are removed."""
        self._put(tuple(values[Key(0, name, name)] for name in self.names))
        contents: list[dict[Any, Any]] = [{} for _ in self._mutable_objects]
        for key, value in values.items():
            if key.owner:
                contents[key.owner - 1][key.entry] = value
        for owner, content in zip(self._mutable_objects, contents, strict=True):
            owner.fill(content)

    def side(
        self, values: dict[Key, Any], changed: Iterable[Key] = ()
    ) -> BranchContents:
        """The contents of the containers, and which other objects changed."""
        found: dict[int, dict[Any, Any]] = {
            id(owner.target): {} for owner in self._mutable_objects if _has_parts(owner)
        }
        for key, value in values.items():
            owner = self.owner(key)
            if owner is not None and _has_parts(owner):
                found[id(owner.target)][key.entry] = value
        others = filter(None, map(self.owner, changed))
        return BranchContents(
            found, frozenset(id(h.target) for h in others if not _has_parts(h))
        )

    def owner(self, key: Key) -> MutableObject | None:
        """The object that a key is an entry of; None for a variable."""
        return self._mutable_objects[key.owner - 1] if key.owner else None

    @contextmanager
    def arrays_locked(self) -> Iterator[None]:
        """Make NumPy arrays that existed before read-only inside."""
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


def _has_parts(owner: MutableObject) -> bool:
    return isinstance(owner, (DictEntries, ListItems))


def _depth(array: Any) -> int:
    return 1 + _depth(array.base) if isinstance(array, np.ndarray) else 0


def display_name(name: str) -> str:
    """The name of a variable in messages."""
    if name == RESULT:
        return RETURN_VALUE_NAME
    if name.startswith(PREFIX):
        return "whether to go on"
    return name
