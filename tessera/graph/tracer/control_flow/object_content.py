# SPDX-License-Identifier: Apache-2.0
"""What an object holds: entries, items, elements or attributes, read and restored."""

import argparse
import collections
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import CellType, FunctionType, ModuleType, SimpleNamespace
from typing import Any, Final

import jax
import numpy as np

from tessera.graph.tracer.control_flow.user_code import is_user_module

VALUE: Final = "<value>"  # the one entry of a variable
ABSENT: Final = object()  # what an entry has that is not there

CONTAINERS = (dict, list, set, collections.deque)
BUFFERS = (np.ndarray, bytearray)
_NAMESPACES = (
    *(SimpleNamespace, argparse.Namespace),
    *(collections.ChainMap, collections.UserDict, collections.UserList),
)


def is_compared(value: Any) -> bool:
    """Whether what a value holds is compared before and after a block."""
    if isinstance(value, (*CONTAINERS, *_NAMESPACES)):
        return True
    others = (tuple, type, FunctionType, ModuleType, BaseException)
    is_users = is_user_module(type(value).__module__) and not isinstance(value, others)
    return is_users and not is_of_flax(value)


def is_of_flax(value: Any) -> bool:
    """Whether a value is an object of Flax, which checks by itself who changes it."""
    return any(kind.__module__.startswith("flax.") for kind in type(value).__mro__)


def is_iterator(value: Any) -> bool:
    """Whether iterating over a value uses it up, like the result of ``iter``.

    An object of a user's own class holds its position in attributes.
    """
    return hasattr(type(value), "__next__") and not hasattr(value, "__dict__")


def content(target: Any) -> dict[Any, Any]:
    """What a variable, container or object holds, by entry."""
    if isinstance(target, dict):
        return dict(dict.items(target))
    if isinstance(target, (list, collections.deque)):
        return dict(enumerate(target))
    if isinstance(target, set):
        return {element: element for element in target}
    if not isinstance(target, CellType):
        return _attributes(target)
    try:
        return {VALUE: target.cell_contents}
    except ValueError:  # not assigned yet
        return {}


def _attributes(target: Any) -> dict[str, Any]:
    """The attributes of an object, in ``__dict__`` and in slots."""
    state: Any = object.__getstate__(target)
    parts = state if isinstance(state, tuple) else (state,)
    return {name: part[name] for part in parts if part for name in part}


def entry_name(target: Any, entry: Any) -> str:
    """How code writes an entry, after the name of what holds it."""
    if isinstance(target, CellType):
        return ""
    if isinstance(target, set):
        return f" that holds {entry!r}"
    return f"[{entry!r}]" if isinstance(target, CONTAINERS) else f".{entry}"


def fill(target: Any, held: Mapping[Any, Any]) -> None:
    """Restore what an object held; what it still holds is left alone."""
    changed = differences(content(target), held)
    if not changed:
        return
    if isinstance(target, (set, list, collections.deque)):
        target.clear()
        if isinstance(target, set):
            target.update(held)
        else:
            target.extend(held[index] for index in sorted(held))
        return
    for entry, value in changed.items():
        if isinstance(target, CellType):
            if value is ABSENT:
                del target.cell_contents
            else:
                target.cell_contents = value
        elif isinstance(target, dict):
            if value is ABSENT:
                dict.__delitem__(target, entry)
            else:
                dict.__setitem__(target, entry, value)
        elif value is ABSENT:
            object.__delattr__(target, entry)
        else:
            object.__setattr__(target, entry, value)


def differences(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> dict[Any, Any]:
    """Entries of ``after`` that have another value, and ``ABSENT`` for removed ones.

    Values are compared by identity.

    Example:
      >>> differences({"a": 1, "b": 2}, {"a": 1, "b": 2, "c": 3})
      {'c': 3}
    """
    missing = object()
    found = {
        entry: value
        for entry, value in after.items()
        if before.get(entry, missing) is not value
    }
    return found | {entry: ABSENT for entry in before if entry not in after}


@dataclass(frozen=True)
class Tree:
    """A value as it is at the end of a block, flattened.

    Attributes:
      value: The value, whose content may be undone since.
      leaves: Its leaves.
      paths: Where they are, as messages write it: ``['loss']``.
      structure: JAX's tree definition.
    """

    value: Any
    leaves: Sequence[Any]
    paths: Sequence[str]
    structure: Any


def flattened(value: Any) -> Tree:
    """A value as it is now."""
    pairs, structure = jax.tree_util.tree_flatten_with_path(value, is_leaf=is_iterator)
    paths = [jax.tree_util.keystr(path) for path, _ in pairs]
    return Tree(value, [leaf for _, leaf in pairs], paths, structure)


def snapshot(target: Any) -> Any:
    """A copy of what an object, array or bytes hold."""
    return target.copy() if isinstance(target, BUFFERS) else content(target)


def restored(target: Any, held: Any) -> bool:
    """Restore what a snapshot holds; whether something had changed."""
    if isinstance(target, BUFFERS):
        has_changed = bytes(target) != bytes(held)
        if has_changed and isinstance(target, np.ndarray):
            target[...] = held
        elif has_changed:
            target[:] = held
        return has_changed
    changed = differences(content(target), held)
    fill(target, held)
    return bool(changed)
