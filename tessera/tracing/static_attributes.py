# SPDX-License-Identifier: Apache-2.0
"""Static attributes of NNX objects that have no hash: lists, dicts, configurations.

A program is looked up by the static attributes of the objects that it was compiled for.
One that may change in place is compared by what it held when the call was made, and a
trace gets a copy of it, so that another content compiles another program.
"""

import copy
import dataclasses
from collections.abc import Callable, Hashable
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """What a static attribute held when an object was split.

    Attributes:
      value: A copy of it.
      key: Equal for attributes of equal content; hashable.
      original: The attribute itself.
    """

    value: Any
    key: Hashable
    original: Any

    @classmethod
    def of(cls, attribute: Any) -> "Snapshot":
        """A copy of an attribute.

        Raises:
          TypeError: It can neither be hashed nor copied and compared.
        """
        return cls(_copy_of(attribute), _key_of(attribute), attribute)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Snapshot) and other.key == self.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return repr(self.value)


def with_snapshots(graphdef: Any) -> Any:
    """Flax's description of an object, hashable if possible.

    Args:
      graphdef: The ``nnx.GraphDef``, left as it is.
    """

    def hashable(index: int, value: Any) -> Any:
        del index
        return Snapshot.of(value) if _lacks_hash(value) else value

    try:
        return _mapped(hashable, graphdef)
    except TypeError:
        return graphdef


def without_snapshots(graphdef: Any, given: Any = None) -> Any:
    """The description with values in place of snapshots.

    Args:
      graphdef: The ``nnx.GraphDef`` that ``with_snapshots`` gave.
      given: That of the caller's object, whose own attributes stay where they did not
        change.
    """
    before = () if given is None else given.attributes

    def own(index: int, value: Any) -> Any:
        if not isinstance(value, Snapshot):
            return value
        if index < len(before):
            (name, _), (name_before, was) = graphdef.attributes[index], before[index]
            if name == name_before and getattr(was, "value", None) == value:
                return was.value.original
        return _copy_of(value.value)

    return _mapped(own, graphdef)


def _mapped(change: Callable[[int, Any], Any], graphdef: Any) -> Any:
    """The description with ``change`` applied to its static attributes, by position."""
    changed = {}
    for index, (name, attribute) in enumerate(graphdef.attributes):
        # Flax's NodeAttr and LeafAttr stand for attributes that are not static.
        value = getattr(attribute, "value", None)
        if (new := change(index, value)) is not value:
            changed[index] = name, dataclasses.replace(attribute, value=new)
    if not changed:
        return graphdef
    pairs = enumerate(graphdef.attributes)
    attributes = [changed.get(index, pair) for index, pair in pairs]
    return dataclasses.replace(graphdef, attributes=attributes)


def _lacks_hash(value: Any) -> bool:
    kind = type(value)
    if kind.__hash__ is None:
        return True
    if kind is tuple or dataclasses.is_dataclass(kind):
        try:
            hash(value)
        except TypeError:
            return True
    return False


def _key_of(value: Any) -> Hashable:
    """A hashable value that is equal for equal content of equal types."""
    kind = type(value)
    if kind is float or kind is complex:
        return kind, repr(value)  # 0.0 differs from -0.0, and nan equals nan
    if kind is list or kind is tuple:
        return kind, tuple(map(_key_of, value))
    if kind is dict:
        return kind, tuple((_key_of(key), _key_of(item)) for key, item in value.items())
    if kind is set:
        return kind, frozenset(map(_key_of, value))
    if _is_plain_dataclass(value):
        return kind, tuple(map(_key_of, _fields(value).values()))
    return kind, _ByEquality(value) if _lacks_hash(value) else value


def _copy_of(value: Any) -> Any:
    """A copy that shares nothing with a value that changes in place."""
    kind = type(value)
    if kind is list or kind is tuple:
        return kind(map(_copy_of, value))
    if kind is dict:
        return {key: _copy_of(item) for key, item in value.items()}
    if not _lacks_hash(value):
        return value
    if not _is_plain_dataclass(value):
        return copy.deepcopy(value)
    copied = copy.copy(value)
    for name, item in _fields(value).items():
        object.__setattr__(copied, name, _copy_of(item))
    return copied


def _is_plain_dataclass(value: Any) -> bool:
    """Whether a value is no more than the fields of its dataclass."""
    if not dataclasses.is_dataclass(value) or not _lacks_hash(value):
        return False
    return getattr(value, "__dict__", {}).keys() <= _fields(value).keys()


def _fields(value: Any) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}


class _ByEquality:
    """Compares a value of a user's own type by its ``==``, as it was."""

    def __init__(self, value: Any) -> None:
        self._value = copy.deepcopy(value)
        if not self._value == value:
            raise TypeError(f"unhashable type: {type(value).__name__!r}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByEquality) and bool(self._value == other._value)

    def __hash__(self) -> int:
        return hash(type(self._value))
