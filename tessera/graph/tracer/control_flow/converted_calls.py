# SPDX-License-Identifier: Apache-2.0
"""AutoGraph dispatch: the operators and calls that converted code makes.

A call of a user's function calls it converted; a library's is called as it is, and the
user's functions that it is handed are converted.
"""

import functools
import inspect
import weakref
from collections.abc import Callable
from types import (
    BuiltinFunctionType,
    FunctionType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import jax

from tessera.errors import BranchError, ControlFlowError
from tessera.graph.tracer.control_flow import (
    branches,
    loops,
    own_objects,
    printing,
)
from tessera.graph.tracer.control_flow.absent_values import NotReturned
from tessera.graph.tracer.control_flow.conversion_state import (
    current,
    recorded,
)
from tessera.graph.tracer.control_flow.function_source import (
    AssignsOutside,
    Unconvertible,
)
from tessera.graph.tracer.control_flow.source_conversion import convert
from tessera.graph.tracer.control_flow.user_code import (
    is_user_function,
    target_of,
    user_line,
)
from tessera.jax_compat import jaxprs

# --- what converted functions do besides control flow


def _returned(value: Any, returned: Any) -> Any:
    """The result of a converted function, at its end."""
    if isinstance(value, NotReturned):
        return None
    if isinstance(returned, jaxprs.Tracer) and value is not None:
        raise BranchError(
            f"the function at {user_line()} returns a value on one way through it, and "
            "None on another",
            got="a `return` in a branch or a loop, and no `return` at the end",
            fix="return a value of the same type at the end",
        )
    return value


def _is(first: Any, second: Any) -> bool:
    """``first is second``; refused for what a merge point may have replaced."""
    is_alike = isinstance(first, jax.Array) and isinstance(second, jax.Array)
    if isinstance(first, (tuple, *own_objects.CONTAINERS)):
        is_alike = type(first) is type(second)
    if first is not second and is_alike and current() is not None:
        raise ControlFlowError(
            f"whether two objects are one is asked at {user_line()}, and may be known "
            "only when the program runs",
            got=f"a {type(first).__name__} and a {type(second).__name__}",
            fix="compare what they hold, or remember it in a variable",
        )
    return first is second


def converted_call(function: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call a function from converted code: convert it if it is the user's."""
    if isinstance(function, functools.partial):
        kwargs = {**function.keywords, **kwargs}
        return converted_call(function.func, *function.args, *args, **kwargs)
    if isinstance(function, BuiltinFunctionType | type) and function in _BUILTINS:
        return _BUILTINS[function](*args, **kwargs)
    if _has_plain_constructor(function):
        new = object.__new__(function)
        own_objects.adopt_result(new, function, {})
        converted_call(function.__init__, new, *args, **kwargs)
        return new
    target, bound = target_of(function)
    unseen = ""
    if target is not None:
        made = converted(target)
        if isinstance(made, FunctionType):
            return made(*bound, *args, **kwargs)
        if isinstance(made, AssignsOutside) and current() is not None:
            raise ControlFlowError(
                f"{target.__qualname__}(), called at {user_line()}, assigns the "
                f"variable {str(made)!r}, which is not its own",
                got="`global` or `nonlocal`",
                fix="pass the value as an argument, and return the new one",
            )
        if not target.__name__.startswith("__"):
            unseen = f"{target.__qualname__}() runs as it is: {made}"
    return _library_call(function, unseen, args, kwargs)


def _print_call(function: Any, /, *values: Any, **options: Any) -> Any:
    """A call of what the code calls ``print``."""
    if function is not print:
        values = tuple(map(printing.known_text, values))
    return converted_call(function, *values, **options)


def _library_call(function: Any, unseen: str, args: Any, kwargs: Any) -> Any:
    """Call a function as it is, and refuse side effects that a program cannot have.

    Args:
      function: What is called.
      unseen: Why it is the user's all the same; nothing of a library's.
      args: Its arguments.
      kwargs: Its keyword arguments.
    """
    _require_traceable(function, unseen, (*args, *kwargs.values()))
    owner = getattr(function, "__self__", None)
    given = [None if isinstance(owner, ModuleType) else owner, *args, *kwargs.values()]
    with own_objects.only_own_changed(function, given) as objects:
        named = {name: _callback(value) for name, value in kwargs.items()}
        result = function(*map(_callback, args), **named)
    own_objects.adopt_result(result, function, objects)
    return result


# Calls into these modules have side effects that are neither compared nor undone.
_STATEFUL = frozenset(
    {"_contextvars", "_io", "_queue", "_socket", "_thread", "_weakref", "array"}
    | {"asyncio", "contextvars", "io", "multiprocessing", "os", "posix", "queue"}
    | {"random", "shutil", "socket", "subprocess", "threading", "weakref"}
)


def _require_traceable(function: Any, unseen: str, values: tuple[Any, ...]) -> None:
    """Refuse, in a block, code that is not seen, random numbers and files."""
    conversion = current()
    if conversion is None or not conversion.blocks:
        return
    if any(map(_is_stateful, (function, *values))) or function is input:
        unseen = f"a call of {getattr(function, '__qualname__', repr(function))}()"
    if not unseen:
        return
    raise ControlFlowError(
        f"a branch or loop that is traced whether it runs or not does at {user_line()} "
        "what cannot be undone",
        got=unseen,
        fix="do it before or after\n"
        "to write something each time that the program runs, use print(x) or "
        "jax.debug.callback; for random numbers use jax.random with a key",
    )


def _is_stateful(value: Any) -> bool:
    """Whether a value is, or is a method of, a file, a random generator or the like."""
    owner = getattr(value, "__self__", None)
    is_method = owner is not None and not isinstance(owner, (ModuleType, type))
    kinds = type(owner if is_method else value).__mro__
    modules = [getattr(kind, "__module__", None) or "" for kind in (*kinds, value)]
    return any(
        str(m).partition(".")[0] in _STATEFUL or str(m).startswith("numpy.random")
        for m in modules
    )


def _has_plain_constructor(function: Any) -> bool:
    """Whether a call makes an object of a user's class, by its ``__init__`` alone."""
    return (
        type(function) is type
        and function.__new__ is object.__new__
        and isinstance(function.__init__, FunctionType)
        and is_user_function(function.__init__)
    )


def _setattr(value: Any, name: str, new: Any) -> None:
    setattr(own_objects.written(value, f"a {type(value).__name__}"), name, new)


def _delattr(value: Any, name: str) -> None:
    delattr(own_objects.written(value, f"a {type(value).__name__}"), name)


# What converted code calls instead.
_BUILTINS: dict[Any, Callable[..., Any]] = {
    print: printing.print_,
    type: type,  # the class of an object is not new
    setattr: _setattr,
    delattr: _delattr,
}


_OPERATORS: dict[str, Callable[..., Any]] = {
    "call": converted_call,
    "returned": _returned,
    "load": own_objects.load,
    "made": own_objects.made,
    "written": own_objects.written,
    "in_place": own_objects.in_place,
    "is_": _is,
    "if_stmt": branches.if_stmt,
    "if_exp": branches.if_exp,
    "and_": branches.and_,
    "or_": branches.or_,
    "not_": branches.not_,
    "turns": loops.turns,
    "items": loops.items,
    "print_call": _print_call,
    "printed_text": printing.printed_text,
}
# The operators that converted code calls for statements and expressions.
OPERATORS = SimpleNamespace(
    NotReturned=NotReturned,
    **{name: recorded(operator) for name, operator in _OPERATORS.items()},
)


# --- functions, converted

_converted: "weakref.WeakKeyDictionary[FunctionType, FunctionType | Unconvertible]" = (
    weakref.WeakKeyDictionary()
)
_made: "weakref.WeakSet[FunctionType]" = weakref.WeakSet()


def converted(function: FunctionType) -> FunctionType | Unconvertible:
    """The converted function, made once; or why it cannot be converted."""
    if function in _made:
        return function
    if function not in _converted:
        try:
            _converted[function] = made = convert(function, OPERATORS)
            _made.add(made)
        except Unconvertible as error:
            _converted[function] = error
    found, conversion = _converted[function], current()
    if isinstance(found, Unconvertible) and conversion is not None:
        conversion.failures[function.__qualname__] = str(found)
    return found


def as_callback(function: Callable[..., Any]) -> Callable[..., Any]:
    """A user's function for a library to call: it runs converted."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with own_objects.arguments_adopted(*args, *kwargs.values()):
            return converted_call(function, *args, **kwargs)

    return run


def _callback(value: Any) -> Any:
    """A callback passed to a library, converted if it is the user's, or checked.

    JAX finds its programs by the function, so that is one object for each.
    """
    if inspect.isbuiltin(value) and isinstance(value.__self__, own_objects.CONTAINERS):
        return functools.partial(converted_call, value)  # may change its container
    if not isinstance(value, (FunctionType, MethodType, functools.partial)):
        return value
    target, _ = target_of(getattr(value, "func", value))
    conversion = current()
    if target is None or type(converted(target)) is Unconvertible:
        return value
    if conversion is None or not isinstance(value, FunctionType):
        return as_callback(value)
    return conversion.callbacks.setdefault(value, as_callback(value))
