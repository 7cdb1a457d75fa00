# SPDX-License-Identifier: Apache-2.0
"""What converted code may change: the objects that the call has made or was given.

They are recorded as they are made: dicts, lists and sets that the code writes down,
objects of classes that it calls, copies that libraries return, arguments. Stores into
anything else are refused by name, and so is a call of a library that changes anything
else. A block changes what is recorded before it, and ``block_state.py`` compares that;
NumPy arrays and iterators are not compared, so a block may only change its own.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType
from typing import Any

import jax
import numpy as np

from tessera.errors import ControlFlowError
from tessera.graph.tracer.control_flow.absent_values import Unusable
from tessera.graph.tracer.control_flow.conversion_state import Conversion, current
from tessera.graph.tracer.control_flow.object_content import (
    BUFFERS,
    CONTAINERS,
    content,
    is_compared,
    is_iterator,
    is_of_flax,
    restored,
    snapshot,
)
from tessera.graph.tracer.control_flow.user_code import user_line
from tessera.jax_compat import jaxprs

# These change no Python object that they are given, and return new containers.
_FUNCTIONAL = ("jax", "jaxlib", "flax", "optax", "tessera")
_RETURN_NEW = (*_FUNCTIONAL, "collections", "copy", "dataclasses", "json", "numpy")


def mutable_objects(values: Iterable[Any]) -> dict[int, Any]:
    """Containers, objects, arrays and iterators in some values, by id.

    Nested containers and pytrees are followed, attributes of objects are not.
    """
    found: dict[int, Any] = {}
    waiting = [*values]
    while waiting:
        value = waiting.pop()
        if id(value) in found or isinstance(value, (str, jax.Array)):
            continue
        if isinstance(value, BUFFERS) or is_compared(value) or is_iterator(value):
            found[id(value)] = value
        waiting += _parts(value)
    return found


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return dict.values(value)
    if isinstance(value, (list, tuple, deque)):
        return value
    level = jax.tree_util.default_registry.flatten_one_level(value)
    return [] if level is None else level[0]


def _with_attributes(values: Iterable[Any]) -> list[Any]:
    """Some values, and the attributes of those that are objects of plain classes."""
    found = [*values]
    for value in tuple(found):
        if is_compared(value) and not isinstance(value, CONTAINERS):
            found += content(value).values()
    return found


def parts_of(values: Iterable[Any]) -> dict[int, Any]:
    """``mutable_objects`` in some values and in the attributes of those values."""
    return mutable_objects(_with_attributes(values))


def foreign_parts(objects: Iterable[Any]) -> list[Any]:
    """Containers and objects within the call's own that it has not made itself."""
    own = getattr(current(), "own", {})
    return [v for i, v in parts_of(objects).items() if i not in own and is_compared(v)]


# --- recording


def made(value: Any) -> Any:
    """Record that the value of an expression is new, and return it."""
    conversion = current()
    kinds = (*CONTAINERS, *BUFFERS, FunctionType, type)
    if conversion is not None and (isinstance(value, kinds) or is_iterator(value)):
        conversion.adopt([value])
    return value


@contextmanager
def arguments_adopted(*values: Any) -> Iterator[None]:
    """Record what JAX hands to a function of the user, and has made for it."""
    conversion = current()
    if conversion is None:
        yield
        return
    visible, conversion.visible = conversion.visible, None
    if visible is not None:
        objects = mutable_objects(values)
        conversion.adopt(v for i, v in objects.items() if i not in visible)
    try:
        yield
    finally:
        conversion.visible = visible


def adopt_result(result: Any, function: Any, known: Mapping[int, Any]) -> None:
    """Record what a call has made.

    Args:
      result: What it returns.
      function: What was called.
      known: What was there before, by id: ``parts_of`` what the call was given.
    """
    conversion = current()
    if conversion is None:
        return
    method = hasattr(function, "__self__") and getattr(function, "__name__", "")
    if isinstance(function, type):
        if FunctionType not in (type(function.__new__), type(type(function).__call__)):
            # Containers that a constructor has made, such as defaults of a dataclass.
            attributes = _with_attributes([result])[1:]
            objects = [result, *(v for v in attributes if isinstance(v, CONTAINERS))]
            conversion.adopt(v for v in objects if id(v) not in known)
    elif _package(function) in _RETURN_NEW:
        conversion.adopt(v for i, v in parts_of([result]).items() if i not in known)
    elif is_iterator(result) or function is sorted or method == "copy":
        is_new = function is not next and id(result) not in known
        conversion.adopt([result] if is_new else [])
    shared = {i for i, v in known.items() if is_iterator(v)}
    is_own = is_iterator(result) and id(result) in conversion.own
    if is_own and shared <= conversion.fresh:
        conversion.fresh.add(id(result))


def _package(function: Any) -> str:
    """The package that a function is from, whatever it wraps."""
    function = getattr(function, "__func__", function)
    if isinstance(function, FunctionType):
        module = function.__globals__.get("__name__")
    elif isinstance(function, (BuiltinFunctionType, type)):
        owner = getattr(function, "__self__", None)
        module = function.__module__ or type(owner).__module__
    else:
        module = type(function).__module__
    return str(module).partition(".")[0]


# --- checking


def load(value: Any, name: str) -> Any:
    """An iterator that is named; it must be one that the block has made."""
    conversion = current()
    if type(value) is Unusable:
        value.read()
    if conversion is None or not is_iterator(value):
        return value
    conversion.fresh.discard(id(value))
    if not _is_of_block(value, conversion):
        raise ControlFlowError(
            f"the iterator {name!r} is used at {user_line()}, by code that is traced "
            "whether it runs or not, or more than once",
            got=f"a {type(value).__name__} from before",
            fix="take what is needed from it before, or make a list of it",
        )
    return value


def _is_of_block(value: Any, conversion: Conversion) -> bool:
    """Whether the block that is being traced has made an object."""
    while isinstance(value, np.ndarray) and isinstance(value.base, np.ndarray):
        value = value.base
    _, depth = conversion.own.get(id(value), (None, -1))
    return depth == conversion.blocks


def _may_change(value: Any, conversion: Conversion) -> bool:
    """Whether it is compared and the call's own, or made by the block itself."""
    is_own = id(value) in conversion.own
    return is_own if is_compared(value) else _is_of_block(value, conversion)


def written(value: Any, name: str) -> Any:
    """Check that code may assign into an object, and return the object.

    Raises:
      ControlFlowError: [T319] it may not.
    """
    conversion = current()
    is_traced = isinstance(value, (jax.Array, jax.Ref, jaxprs.Tracer))
    if conversion is None or is_traced or is_of_flax(value):
        return value
    if not _may_change(value, conversion):
        raise change_error(value, f"{name!r} is changed")
    return value


def in_place(value: Any, name: str) -> None:
    """Check that ``+=`` may change an object in place, if it can."""
    if hasattr(type(value), "__iadd__") or isinstance(value, (dict, set)):
        written(value, name)


def change_error(value: Any, change: str) -> ControlFlowError:
    """The error [T319] for a change of what converted code may not change."""
    if isinstance(value, BUFFERS):
        got = "a NumPy array or bytes from outside, or from before the branch or loop"
    else:
        got = f"a {type(value).__name__} that is global, closed over or a library's, "
        got += "or one of two that a branch chose between"
    return ControlFlowError(
        f"{change} at {user_line()}, and this call has not made it",
        got=got,
        fix="pass it as an argument and assign into that, or return the new value\n"
        "change a copy, such as dict(x), list(x) or x.copy()",
    )


@contextmanager
def only_own_changed(function: Any, given: list[Any]) -> Iterator[dict[int, Any]]:
    """Run a library's function, and refuse what it changes beside the call's own.

    Gives the parts of what the function is given, as they are before it runs.
    """
    conversion = current()
    if conversion is None:
        yield {}
        return
    objects = parts_of(given)
    before = conversion.visible
    is_functional = _package(function) in _FUNCTIONAL
    conversion.visible = frozenset(objects) if is_functional else None
    foreign = [v for v in objects.values() if not _may_change(v, conversion)]
    is_builtin = _package(function) == "builtins" and given[0] is None
    snapshots = [
        (value, snapshot(value))
        for value in (() if is_functional else foreign)
        if not is_iterator(value) and not (is_builtin and isinstance(value, np.ndarray))
    ]
    try:
        yield objects
    finally:
        conversion.visible = before
        for value, held in snapshots:
            if restored(value, held):
                name = getattr(function, "__qualname__", repr(function))
                raise change_error(value, f"what {name}() is given is changed")
