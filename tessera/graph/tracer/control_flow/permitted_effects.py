# SPDX-License-Identifier: Apache-2.0
"""What code in a traced block may do: the stores and calls that are refused by name.

A block may change variables, entries of containers, and attributes of objects that the
call made. Those are compared before and after it (``block_state.py``). Here is what no
comparison would show: arrays that are locked, random numbers, and what libraries keep.
"""

import collections
import random
from types import BuiltinMethodType, MethodType, ModuleType
from typing import Any

import jax
import numpy as np

from tessera.errors import ControlFlowError
from tessera.graph.tracer.control_flow.active_conversion import current
from tessera.graph.tracer.control_flow.reachability import Reach, is_tracked
from tessera.graph.tracer.control_flow.user_code import user_line

# What these hold or do is not followed, and not undone.
_FRAME_READERS = (globals, locals, vars, dir, eval, exec, super)
_STATEFUL = frozenset(
    {"_contextvars", "_io", "_queue", "_socket", "_thread", "_weakref", "array"}
    | {"asyncio", "contextvars", "io", "multiprocessing", "os", "posix", "queue"}
    | {"random", "shutil", "socket", "subprocess", "threading", "weakref"}
)
_RANDOM = (random.Random, np.random.Generator, np.random.RandomState)


def require_tracked(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Refuse a call that reads the frame, or whose side effects are not tracked."""
    if not args and any(function is each for each in _FRAME_READERS):
        raise ControlFlowError(
            f"{function.__name__}() at {user_line()} is called under another name",
            fix="call it by its own name",
        )
    conversion = current()
    if conversion is None or not conversion.blocks:
        return
    owner = getattr(function, "__self__", None)
    has_owner = owner is not None and not isinstance(owner, (ModuleType, type))
    kinds = type(owner).__mro__ if has_owner else (function,)
    modules = {getattr(kind, "__module__", None) or "" for kind in kinds}
    is_stateful = any(
        m.partition(".")[0] in _STATEFUL or m.startswith("numpy.random")
        for m in modules
    )
    is_handed = any(map(_is_random, (*args, *kwargs.values())))
    if is_stateful or is_handed or function is input:
        name = getattr(function, "__qualname__", repr(function))
        raise untracked_error(f"a call of {name}()")


def _is_random(value: Any) -> bool:
    """Whether a value is a random generator, or a method of one."""
    is_method = isinstance(value, (BuiltinMethodType, MethodType))
    owner = value.__self__ if is_method else value
    return isinstance(owner, _RANDOM)


def check_assignment(value: Any) -> Any:
    """Check that an assignment into an object is tracked, and return the object.

    Raises:
      ControlFlowError: [T319] it is in a traced block, and is not tracked; or the
        object is an array that is locked.
    """
    check_in_place(value)
    conversion = current()
    if conversion is None or not conversion.blocks or isinstance(value, jax.Array):
        return value
    if not is_tracked(value):
        kind = type(value)
        raise untracked_error(f"an assignment into a {kind.__module__}.{kind.__name__}")
    return value


def check_in_place(value: Any) -> None:
    """Check that a value, which an operation may change in place, is not locked."""
    conversion = current()
    has_locked = conversion is not None and conversion.locked
    if has_locked and isinstance(value, np.ndarray) and not value.flags.writeable:
        raise locked_array_error()


def locked_array_error() -> ControlFlowError:
    """The error [T319] for a store into a NumPy array that is locked."""
    return ControlFlowError(
        f"a NumPy array is written into at {user_line()}, and a branch or loop that is "
        "traced can reach it",
        got="such an array is read-only from there on, until the call ends",
        fix="write before it, into a copy, or use a jax.numpy array and x.at[i].set(v)",
    )


def untracked_error(use: str) -> ControlFlowError:
    """The error [T319] for an untracked side effect in a traced block."""
    return ControlFlowError(
        f"a branch or loop that is traced whether it runs or not does at {user_line()} "
        "what cannot be undone",
        got=use,
        fix="do it before or after; to write something when the program runs, print it "
        "or use jax.debug.callback; for random numbers use jax.random with a key",
    )


# What these return is new, or part of what they are given.
_KEEP_NOTHING = frozenset(
    {"builtins", "collections", "copy", "dataclasses", "flax", "jax", "jaxlib"}
    | {"json", "numpy", "optax", "tessera"}
)


def record_library_state(
    result: Any, function: Any, arguments: tuple[Any, ...]
) -> None:
    """Record a container that a library may keep: a block must not mutate it."""
    conversion = current()
    is_container = isinstance(result, (dict, list, set, collections.deque))
    if conversion is None or not is_container or any(result is a for a in arguments):
        return
    owner = getattr(function, "__self__", None)
    module = getattr(function, "__module__", None) or type(owner).__module__
    if module.partition(".")[0] not in _KEEP_NOTHING:
        name = getattr(function, "__qualname__", repr(function))
        kept = Reach([], [(f"{name}()", result)], conversion.outside)
        conversion.record_library_state(kept.mutable_objects)
