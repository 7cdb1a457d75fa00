# SPDX-License-Identifier: Apache-2.0
"""Flatten and rebuild containers, one level at a time.

What a dict or list holds at the end of a block is read before the block is undone, so
it comes from such a reading (``contents``), not from the dict itself.
"""

import collections
import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from tessera.graph.tracer.control_flow.mutable_objects import (
    is_iterator,
    mutable_object,
)

Contents = Mapping[int, Mapping[Any, Any]]


@dataclass(frozen=True)
class BranchContents:
    """The contents of existing containers after one branch, or one loop iteration.

    Attributes:
      contents: What dicts, lists and deques hold at its end, by their id.
      changed: Ids of other things that it changed.
    """

    contents: Contents
    changed: frozenset[int] = frozenset()


_CONTAINERS = (dict, list, collections.deque)


@dataclass(frozen=True)
class Parts:
    """A flattened container.

    Attributes:
      form: Equals that of another container which has the same places for parts.
      parts: By place, as messages write it: ``['loss']``.
      make: Makes such a container from other parts in this order.
    """

    form: Any
    parts: Mapping[str, Any]
    make: Callable[[Sequence[Any]], Any]


def parts_of(value: Any, contents: Contents) -> Parts | None:
    """The parts of a dict, list, tuple or registered pytree; None of other values."""
    if is_iterator(value):
        return None
    if isinstance(value, _CONTAINERS):
        content = contents.get(id(value))
        if content is None:
            content = mutable_object(value, "", False).content()
        return _parts_of_entries(value, content)

    def is_part(each: Any) -> bool:
        return each is not value

    paths, tree = jax.tree_util.tree_flatten_with_path(value, is_leaf=is_part)
    if jax.tree_util.treedef_is_leaf(tree) or value is None:
        return None
    parts = {jax.tree_util.keystr(path): part for path, part in paths}
    return Parts(tree, parts, lambda others: jax.tree.unflatten(tree, others))


def _parts_of_entries(value: Any, content: Mapping[Any, Any]) -> Parts:
    kind, keys = type(value), tuple(content)

    def make(others: Sequence[Any]) -> Any:
        made = kind() if kind in (dict, list) else copy.copy(value)
        filled = dict(zip(keys, others, strict=True))
        mutable_object(made, "", False).fill(filled)
        return made

    form = (kind, frozenset(keys), getattr(value, "maxlen", None))
    return Parts(form, {f"[{key!r}]": content[key] for key in keys}, make)


def leaves_in(values: Iterable[Any], contents: Contents) -> list[Any]:
    """The leaves of some values, each object once."""
    found: list[Any] = []
    seen: dict[int, Any] = {}
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        parts = parts_of(value, contents)
        if parts is None:
            found.append(value)
        else:
            waiting += parts.parts.values()
    return found
