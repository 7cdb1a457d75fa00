# SPDX-License-Identifier: Apache-2.0
"""What converted code may change: what the call has made or was given.

They are recorded as they are made: dicts, lists and sets that the code writes down,
objects of classes that it calls, copies that libraries return, arguments. Stores into
anything else are refused by name, and so is a call of a library that changes anything
else. Branches and loops are traced whether they run or not: ``block_state.py`` makes
their changes of dicts and lists part of the program, and refuses those of anything else
that was made before.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    ModuleType,
)
from typing import Any, Final

import jax
import numpy as np

from tessera.errors import ControlFlowError
from tessera.graph.tracer.control_flow.absent_values import Unusable
from tessera.graph.tracer.control_flow.conversion_state import Conversion, current
from tessera.graph.tracer.control_flow.user_code import is_user_module, user_line
from tessera.jax_compat import jaxprs

VALUE: Final = "<value>"  # the one entry of a variable
ABSENT: Final = object()  # what an entry has that is not there

TREES = (dict, list)  # what a branch may change that was made before it
CONTAINERS = (*TREES, set, deque)
_BUFFERS = (np.ndarray, bytearray)

# These change no Python object that they are given, and return new containers.
_FUNCTIONAL = ("jax", "jaxlib", "flax", "optax", "tessera")
_RETURN_NEW = (*_FUNCTIONAL, "collections", "copy", "dataclasses", "json", "numpy")


# --- what there is


def is_compared(value: Any) -> bool:
    """Whether what a value holds can be compared before and after some code."""
    if isinstance(value, (*CONTAINERS, *_BUFFERS)):
        return True
    others = (tuple, type, FunctionType, ModuleType, BaseException)
    is_users = is_user_module(type(value).__module__) and not isinstance(value, others)
    return is_users and not _is_of_flax(value)


def _is_of_flax(value: Any) -> bool:
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
        return dict(_plain_kind(target).items(target))
    if isinstance(target, (list, deque)):
        return dict(enumerate(target))
    if isinstance(target, set):
        return dict.fromkeys(target)
    if isinstance(target, _BUFFERS):
        return {VALUE: bytes(target)}
    if not isinstance(target, CellType):
        return attributes(target)
    try:
        return {VALUE: target.cell_contents}
    except ValueError:  # not assigned yet
        return {}


def _plain_kind(target: Any) -> Any:
    """The class whose methods a dict has if its own class changes none."""
    return OrderedDict if isinstance(target, OrderedDict) else dict


def attributes(target: Any) -> dict[str, Any]:
    """The attributes of an object, in ``__dict__`` and in slots.

    A dict that is its own ``__dict__`` has only entries.
    """
    if getattr(target, "__dict__", None) is target:
        return {}
    state: Any = object.__getstate__(target)
    parts = state if isinstance(state, tuple) else (state,)
    return {name: part[name] for part in parts if part for name in part}


def differences(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> dict[Any, Any]:
    """Entries of ``after`` that have another value, and ``ABSENT`` for removed ones.

    Values are compared by identity, but for bytes.

    Example:
      >>> differences({"a": 1, "b": 2}, {"a": 1, "b": 2, "c": 3})
      {'c': 3}
    """
    missing = object()
    found = {
        entry: value
        for entry, value in after.items()
        if (old := before.get(entry, missing)) is not value
        and not (isinstance(value, bytes) and value == old)
    }
    return found | {entry: ABSENT for entry in before if entry not in after}


def restore(target: Any, held: Mapping[Any, Any]) -> None:
    """Set what something holds, in its order; what it still holds is left alone."""
    now = content(target)
    changes = differences(now, held)
    if not changes and [*now] == [*held]:
        return
    match target:
        case dict():
            _plain_kind(target).clear(target)
            _plain_kind(target).update(target, held)
        case list() | deque():
            target.clear()
            target.extend(held[index] for index in sorted(held))
        case set():
            target.clear()
            target.update(held)
        case np.ndarray():
            if not target.dtype.hasobject:
                target.flat[:] = np.frombuffer(held[VALUE], target.dtype)
        case bytearray():
            target[:] = held[VALUE]
        case _:
            for name, value in changes.items():
                name = "cell_contents" if isinstance(target, CellType) else name
                if value is ABSENT:
                    object.__delattr__(target, name)
                else:
                    object.__setattr__(target, name, value)


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
        if is_compared(value) or is_iterator(value):
            found[id(value)] = value
        waiting += parts(value)
    return found


def parts(value: Any) -> Iterable[Any]:
    """The values in a container or a node of a pytree."""
    if isinstance(value, dict):
        return dict.values(value)
    if isinstance(value, (list, tuple, deque)):
        return value
    level = jax.tree_util.default_registry.flatten_one_level(value)
    return [] if level is None else level[0]


# --- recording


def made(value: Any) -> Any:
    """Record that the value of an expression is new, and return it."""
    conversion = current()
    kinds = (*CONTAINERS, *_BUFFERS)
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


def adopt_result(result: Any, function: Any, given: Mapping[int, Any]) -> None:
    """Record what a call has made.

    Args:
      result: What it returns.
      function: What was called.
      given: What was there before, by id.
    """
    conversion, new = current(), list[Any]()
    if isinstance(function, type):
        if FunctionType not in (type(function.__new__), type(type(function).__call__)):
            new = [result]
    elif _package(function) in _RETURN_NEW:
        new = [*mutable_objects([result]).values()]
    elif function is sorted or _is_copy_method(function):
        new = [result]
    elif is_iterator(result) and function is not next:
        new.append(result)
    if conversion is not None:
        conversion.adopt(value for value in new if id(value) not in given)


def _is_copy_method(function: Any) -> bool:
    return hasattr(function, "__self__") and function.__name__ == "copy"


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
    """The value of a variable or an entry; an iterator must be one of the block."""
    conversion = current()
    if type(value) is Unusable:
        value.read()
    if conversion is None or not is_iterator(value) or _may_change(value, conversion):
        return value
    raise ControlFlowError(
        f"the iterator {name!r} is used at {user_line()}, by code that is traced "
        "whether it runs or not, or more than once",
        got=f"a {type(value).__name__} from before",
        fix="take what is needed from it before, or make a list of it",
    )


def _may_change(value: Any, conversion: Conversion) -> bool:
    """Whether it is the call's own; for a branch, what it has made, dicts and lists."""
    while isinstance(value, np.ndarray) and isinstance(value.base, np.ndarray):
        value = value.base
    _, depth = conversion.own.get(id(value), (None, None))
    is_tree = isinstance(value, TREES) and depth is not None
    return is_tree or depth == conversion.blocks


def written(value: Any, name: str) -> Any:
    """Check that code may assign into an object, and return the object.

    Raises:
      ControlFlowError: [T319] it may not.
    """
    conversion = current()
    is_traced = isinstance(value, (jax.Array, jax.Ref, jaxprs.Tracer))
    if conversion is None or is_traced or _is_of_flax(value):
        return value
    if not _may_change(value, conversion):
        raise change_error(value, f"{name!r} is changed")
    return value


def in_place(value: Any, name: str) -> None:
    """Check that ``+=`` may change an object in place, if it can."""
    if hasattr(type(value), "__iadd__") or isinstance(value, (dict, set)):
        written(value, name)


def change_error(
    value: Any, change: str, *, of_block: bool = False
) -> ControlFlowError:
    """The error [T319] for a change of what converted code may not change."""
    if isinstance(value, TREES) and not of_block:
        got = "is global, closed over or a library's, or one of two that a branch "
        got += "chose between"
    else:
        got = "is from outside of the call, or from before the branch or loop"
    return ControlFlowError(
        f"{change} at {user_line()}, and this code has not made it",
        got=f"a {type(value).__name__} that {got}",
        fix="a branch or loop may change variables, and dicts and lists that the call "
        "has made or takes as arguments: return the new value, or assign into those\n"
        "change a copy, such as dict(x), list(x) or x.copy()\n"
        "to show a value each time that the program runs, write print(x)",
    )


@contextmanager
def only_own_changed(function: Any, given: list[Any]) -> Iterator[dict[int, Any]]:
    """Run a library's function, and refuse what it changes beside the call's own.

    Args:
      function: What is called.
      given: What it is a method of, or None, and its arguments.

    Yields:
      The mutable objects that it is given, by id.
    """
    conversion, owner = current(), given[0]
    if conversion is None:
        yield {}
        return
    if is_compared(owner) and not isinstance(owner, (*CONTAINERS, *_BUFFERS)):
        given = [*given, *content(owner).values()]
    objects = mutable_objects(given)
    is_functional = _package(function) in _FUNCTIONAL
    before, conversion.visible = conversion.visible, None
    foreign: list[tuple[Any, dict[Any, Any]]] = []
    if is_functional:
        conversion.visible = frozenset(objects)
    else:
        is_reader = _package(function) == "builtins" and owner is None
        foreign = [
            (value, content(value))
            for value in objects.values()
            if is_compared(value) and not _may_change(value, conversion)
            if not (is_reader and isinstance(value, np.ndarray))
        ]
    try:
        yield objects
    finally:
        conversion.visible = before
        for value, held in foreign:
            now = content(value)
            if differences(held, now) or [*held] != [*now]:
                restore(value, held)
                name = getattr(function, "__qualname__", repr(function))
                raise change_error(value, f"what {name}() is given is changed")
