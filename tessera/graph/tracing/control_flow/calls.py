# SPDX-License-Identifier: Apache-2.0
"""What converted code calls: functions, operators, and built-in functions.

A call of a user's function calls it converted; a library's is called as it is, and the
user's functions that it is handed are converted.
"""

import collections
import functools
import inspect
import io
import sys
import weakref
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import jax.numpy as jnp

from tessera import _jax, _jax_traces
from tessera.errors import BranchError, ControlFlowError
from tessera.graph.tracing.control_flow import branches, iterables, loops, printing
from tessera.graph.tracing.control_flow.conversion import current
from tessera.graph.tracing.control_flow.definition import Unconvertible
from tessera.graph.tracing.control_flow.reach import Reach
from tessera.graph.tracing.control_flow.source import convert
from tessera.graph.tracing.control_flow.state import NotReturned, Undefined
from tessera.graph.tracing.control_flow.user_code import (
    is_users,
    target_of,
    user_line,
)

# --- what converted functions do besides control flow


def _returned(value: Any, returned: Any) -> Any:
    """What a function returns at its end."""
    if isinstance(value, NotReturned):
        return None
    if isinstance(returned, _jax.Tracer) and value is not None:
        raise BranchError(
            f"the function at {user_line()} returns a value on one way through it, and "
            "None on another",
            got="a `return` in a branch or a loop, and no `return` at the end",
            fix="return a value of the same type at the end",
        )
    return value


def _load(value: Any) -> Any:
    """A variable's value; an error where it has none that can be used."""
    return value.read() if isinstance(value, Undefined) else value


def _peek(load: Callable[[], Any], name: str) -> Any:
    """A variable's value, or that it has none."""
    try:
        return load()
    except NameError:
        return Undefined(name)


def _keywords(**named: Any) -> dict[str, Any]:
    return named


def converted_call(
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call what a converted function calls."""
    if isinstance(function, functools.partial):
        kwargs = {**function.keywords, **kwargs}
        return converted_call(function.func, (*function.args, *args), kwargs)
    builtin = _builtin(function)
    if builtin is not None:
        return builtin(*args, **kwargs)
    if _has_plain_constructor(function):
        made = object.__new__(function)
        converted_call(function.__init__, (made, *args), kwargs)
        return made
    target, bound = target_of(function)
    made = None if target is None else converted(target)
    if made is not None:
        return made(*bound, *args, **kwargs)
    _require_no_input_or_output(function)
    args = tuple(map(_callback, args))
    kwargs = {name: _callback(value) for name, value in kwargs.items()}
    result = function(*args, **kwargs)
    _note_hidden(result, function, args, kwargs)
    return result


def _has_plain_constructor(function: Any) -> bool:
    """Whether a call makes an object of a user's class, by its ``__init__`` alone."""
    return (
        type(function) is type
        and function.__new__ is object.__new__
        and isinstance(function.__init__, FunctionType)
        and is_users(function.__init__)
    )


def _require_no_input_or_output(function: Any) -> None:
    """Refuse reading and writing of files in a block, which is traced in any case."""
    conversion = current()
    is_file = isinstance(getattr(function, "__self__", None), io.IOBase)
    if conversion is None or not conversion.blocks:
        return
    if is_file or function is open or function is input:
        raise ControlFlowError(
            f"a file is used at {user_line()} in a block that is traced whether it runs "
            "or not",
            got=f"a call of {getattr(function, '__name__', function)!r}",
            fix="print, or call a function of the host with jax.debug.callback",
        )


def _note_hidden(
    result: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Note a container that a library keeps: a block must not change it.

    Something else than the result refers to it, and it was not among the arguments.
    """
    conversion = current()
    is_container = isinstance(result, (dict, list, set, collections.deque))
    if conversion is None or not is_container or sys.getrefcount(result) <= _UNSHARED:
        return
    arguments = [("", value) for value in (*args, *kwargs.values())]
    known = Reach([function], arguments, conversion.outside)
    if id(result) not in {id(holder.thing) for holder in known.holders}:
        conversion.outside[id(result)] = result


def _count_of(result: Any) -> int:
    return sys.getrefcount(result)


# What that is of a result that nothing else refers to: one more for a caller's variable.
_UNSHARED = _count_of([]) + 1


def _builtin(function: Any) -> Callable[..., Any] | None:
    """Ours of a built-in function that traced values are to be given to."""
    if inspect.isbuiltin(function) or isinstance(function, type):
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str):
            return printing.method_of_text(owner, function.__name__)
        return _BUILTINS.get(function)
    return None


def _number(kind: type) -> Callable[..., Any]:
    def cast(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], _jax.Tracer) and args[0].ndim == 0:
            return _jax_traces.as_number(args[0], kind)
        return kind(*args, **kwargs)

    return cast


def _extreme(
    function: Callable[..., Any], pair: Callable[..., Any]
) -> Callable[..., Any]:
    def extreme(*args: Any, **kwargs: Any) -> Any:
        values = args if len(args) > 1 else tuple(args[0]) if args else ()
        if kwargs or not any(isinstance(value, _jax.Tracer) for value in values):
            return function(*args, **kwargs)
        return functools.reduce(pair, values)

    return extreme


def _quantifier(
    function: Callable[..., Any], pair: Callable[..., Any]
) -> Callable[..., Any]:
    def over(values: Any) -> Any:
        values = list(values)
        if not any(isinstance(value, _jax.Tracer) for value in values):
            return function(values)
        return functools.reduce(lambda a, b: pair(a, lambda: b), values)

    return over


_BUILTINS: dict[Any, Callable[..., Any]] = {
    print: printing.print_,
    str: printing.str_,
    range: iterables.range_,
    enumerate: iterables.enumerate_,
    zip: iterables.zip_,
    reversed: iterables.reversed_,
    len: iterables.len_,
    int: _number(int),
    float: _number(float),
    bool: _number(bool),
    max: _extreme(max, jnp.maximum),
    min: _extreme(min, jnp.minimum),
    all: _quantifier(all, branches.and_),
    any: _quantifier(any, branches.or_),
}



class Operators:
    """What converted code calls in the place of statements and operators."""

    call = staticmethod(converted_call)
    keywords = staticmethod(_keywords)
    returned = staticmethod(_returned)
    load = staticmethod(_load)
    peek = staticmethod(_peek)
    if_stmt = staticmethod(branches.if_stmt)
    if_exp = staticmethod(branches.if_exp)
    and_ = staticmethod(branches.and_)
    or_ = staticmethod(branches.or_)
    not_ = staticmethod(branches.not_)
    while_stmt = staticmethod(loops.while_stmt)
    for_stmt = staticmethod(loops.for_stmt)
    format_string = staticmethod(printing.format_string)
    format_percent = staticmethod(printing.format_percent)
    NotReturned = NotReturned


# --- functions, converted

_converted: "weakref.WeakKeyDictionary[FunctionType, FunctionType | None]" = (
    weakref.WeakKeyDictionary()
)
_made: "weakref.WeakSet[FunctionType]" = weakref.WeakSet()


def converted(function: FunctionType) -> FunctionType | None:
    """A function, converted; itself where it is already; None where it cannot be."""
    if function in _made:
        return function
    if function not in _converted:
        try:
            _converted[function] = made = convert(function, Operators)
            _made.add(made)
        except Unconvertible as error:
            _converted[function] = None
            conversion = current()
            if conversion is not None:
                conversion.failures[function.__qualname__] = str(error)
    return _converted[function]


def _callback(value: Any) -> Any:
    """A function that is handed to a library, converted."""
    if isinstance(value, (FunctionType, MethodType, functools.partial)):
        target, _ = target_of(getattr(value, "func", value))
        if target is not None and converted(target) is not None:
            if isinstance(value, FunctionType):
                return converted(target)

            @functools.wraps(target)
            def run(*args: Any, **kwargs: Any) -> Any:
                return converted_call(value, args, kwargs)

            return run
    return value
