# SPDX-License-Identifier: Apache-2.0
"""The state that a block of code can change: read before and after it, then restored.

A branch or a loop's body is traced by running it. What it changed is found by
comparing this state before and after, and is then undone: the outputs of the
traced program take its place.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, NoReturn

from tessera.errors import BranchError
from tessera.graph.tracer.control_flow.active_conversion import current
from tessera.graph.tracer.control_flow.containers import BranchContents
from tessera.graph.tracer.control_flow.mutable_objects import (
    ClosureCell,
    DictEntries,
    ListItems,
    MutableObject,
)
from tessera.graph.tracer.control_flow.reachability import Reach

ABSENT: Final = object()  # what an entry has that is not there


class Unusable:
    """The value of a variable that no program can compute; its use is an error.

    Args:
      error: Makes the error where the variable is used.
    """

    def __init__(self, error: Callable[[], BranchError]) -> None:
        self._error = error

    def read(self) -> NoReturn:
        """Raise the error."""
        raise self._error()

    def _used(self, *_: Any) -> Any:
        return self.read()

    # Code that is not converted, such as a generator's, would take it for a value.
    __bool__ = __call__ = __iter__ = __len__ = __getitem__ = __neg__ = _used
    __add__ = __sub__ = __mul__ = __truediv__ = __matmul__ = __pow__ = _used
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rmatmul__ = __rpow__ = _used
    __lt__ = __le__ = __gt__ = __ge__ = __float__ = __int__ = __index__ = _used


class NotReturned:
    """The result of a function that has not returned yet."""


class Key(NamedTuple):
    """One variable, or one entry of a mutable object.

    Attributes:
      owner: The number of the mutable object; a variable is one itself.
      entry: The entry.
      name: What messages call it.
    """

    owner: int
    entry: Any
    name: str


class State:
    """The variables of a block, and everything else that its code can change.

    Attributes:
      iterators: Iterators from before it that its code can move on, with their names.
      arrays: NumPy arrays from before it that its code can write into.

    Args:
      functions: The functions that are its code.
      values: Other objects that they use, with their names in messages.
    """

    def __init__(
        self,
        functions: Sequence[Callable[..., Any] | None],
        *,
        values: Iterable[tuple[str, Any]] = (),
    ) -> None:
        conversion = current()
        outside = conversion.outside if conversion else {}
        code: list[Any] = [each for each in functions if each]
        reach = Reach(code, values, outside)
        self._mutable_objects = reach.mutable_objects
        self.iterators, self.arrays = reach.iterators, reach.arrays
        self._ids = {id(owner.target) for owner in self._mutable_objects}

    def holds(self, target: Any) -> bool:
        """Whether an object existed before the block."""
        conversion = current()
        is_outside = conversion is not None and id(target) in conversion.outside
        return is_outside or id(target) in self._ids

    def read(self) -> dict[Key, Any]:
        """The value of every variable and entry."""
        return {
            Key(number, entry, owner.entry_name(entry)): value
            for number, owner in enumerate(self._mutable_objects)
            for entry, value in owner.content().items()
        }

    def write(self, values: dict[Key, Any]) -> None:
        """Set every variable and entry; those without a value are removed."""
        contents: list[dict[Any, Any]] = [{} for _ in self._mutable_objects]
        for key, value in values.items():
            contents[key.owner][key.entry] = value
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
            if _has_parts(owner := self.owner(key)):
                found[id(owner.target)][key.entry] = value
        others = map(self.owner, changed)
        return BranchContents(
            found, frozenset(id(h.target) for h in others if not _has_parts(h))
        )

    def owner(self, key: Key) -> MutableObject:
        """The object that a key is an entry of."""
        return self._mutable_objects[key.owner]

    def is_variable(self, key: Key) -> bool:
        """Whether a key is a variable, and not an entry or an attribute."""
        return isinstance(self.owner(key), ClosureCell)


def _has_parts(owner: MutableObject) -> bool:
    return type(owner) in (DictEntries, ListItems)
