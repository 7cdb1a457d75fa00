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
    FunctionType,
    MethodType,
    SimpleNamespace,
)
from typing import Any

import jax
import jax.numpy as jnp

from tessera.errors import BranchError, ControlFlowError
from tessera.graph.tracer.control_flow import branches, iterables, loops, printing
from tessera.graph.tracer.control_flow.active_conversion import current
from tessera.graph.tracer.control_flow.block_state import NotReturned, Unusable
from tessera.graph.tracer.control_flow.function_source import Unconvertible
from tessera.graph.tracer.control_flow.mutable_objects import is_iterator
from tessera.graph.tracer.control_flow.permitted_effects import (
    check_assignment,
    check_in_place,
    locked_array_error,
    record_library_state,
    require_tracked,
)
from tessera.graph.tracer.control_flow.source_conversion import convert
from tessera.graph.tracer.control_flow.user_code import (
    is_user_function,
    target_of,
    user_line,
)
from tessera.jax_compat import jaxprs, traces

# --- what converted functions do besides control flow


def _returned(value: Any, returned: Any) -> Any:
    """The result of a converted function, at its end."""
    conversion = current()
    if conversion is not None:
        conversion.end_function()
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


def _load(value: Any) -> Any:
    """The value of a variable; an error where it has none."""
    return value.read() if isinstance(value, Unusable) else value


def _is(first: Any, second: Any) -> bool:
    """``first is second``; refused where a merge point makes it unknown."""
    conversion = current()
    if first is second or conversion is None:
        return first is second
    arrays = isinstance(first, jax.Array) and isinstance(second, jax.Array)
    merged = any(id(each) in conversion.merged for each in (first, second))
    if merged and (arrays or type(first) is type(second)):
        raise ControlFlowError(
            f"whether two objects are one is asked at {user_line()}, and only known "
            "when the program runs",
            got=f"a {type(first).__name__} that a branch or a loop has left, where "
            "another one was before",
            fix="compare what they hold, or remember it in a variable",
        )
    return False


def converted_call(
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call a function from converted code: convert it if it is the user's."""
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
    require_tracked(function, args, kwargs)
    args = tuple(map(_callback, args))
    kwargs = {name: _callback(value) for name, value in kwargs.items()}
    try:
        result = function(*args, **kwargs)
    except ValueError as error:
        conversion = current()
        if conversion is None or not conversion.locked or "read-only" not in str(error):
            raise
        raise locked_array_error() from error
    record_library_state(result, function, (*args, *kwargs.values()))
    return result


def _iterated_call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call that stands where a loop says what it goes over."""
    result = converted_call(function, args, kwargs)
    is_own = any(function is each for each in (enumerate, zip, reversed))
    if is_own and is_iterator(result) and not any(map(is_iterator, args)):
        return iterables.OwnIterator(result)
    return result


def _has_plain_constructor(function: Any) -> bool:
    """Whether a call makes an object of a user's class, by its ``__init__`` alone."""
    return (
        type(function) is type
        and function.__new__ is object.__new__
        and isinstance(function.__init__, FunctionType)
        and is_user_function(function.__init__)
    )


def _checked(assign: Callable[..., None]) -> Callable[..., None]:
    def assign_checked(value: Any, *rest: Any) -> None:
        assign(check_assignment(value), *rest)

    return assign_checked


def _builtin(function: Any) -> Callable[..., Any] | None:
    """The replacement of a built-in function that takes traced values, if any."""
    if inspect.isbuiltin(function) or isinstance(function, type):
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str):
            return printing.method_of_text(owner, function.__name__)
        return _BUILTINS.get(function)
    return None


def _number(kind: type) -> Callable[..., Any]:
    def cast(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], jaxprs.Tracer) and args[0].ndim == 0:
            return traces.as_number(args[0], kind)
        return kind(*args, **kwargs)

    return cast


def _extreme(
    function: Callable[..., Any], pair: Callable[..., Any]
) -> Callable[..., Any]:
    def extreme(*args: Any, **kwargs: Any) -> Any:
        values = args if len(args) > 1 else tuple(args[0]) if args else ()
        if kwargs or not any(isinstance(value, jaxprs.Tracer) for value in values):
            return function(*args, **kwargs)
        return functools.reduce(pair, values)

    return extreme


def _quantifier(
    function: Callable[..., Any], pair: Callable[..., Any]
) -> Callable[..., Any]:
    def over(values: Any) -> Any:
        values = list(values)
        if not any(isinstance(value, jaxprs.Tracer) for value in values):
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
    setattr: _checked(setattr),
    delattr: _checked(delattr),
}


def _recorded(operator: Callable[..., Any]) -> Callable[..., Any]:
    """An operator whose errors are recorded, even if the user's code catches them."""

    @functools.wraps(operator)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return operator(*args, **kwargs)
        except (BranchError, ControlFlowError) as error:
            conversion = current()
            if conversion is not None:
                conversion.refuse(error)
            raise

    return run


_OPERATORS: dict[str, Callable[..., Any]] = {
    "call": converted_call,
    "iterated_call": _iterated_call,
    "keywords": dict,
    "returned": _returned,
    "load": _load,
    "written": check_assignment,
    "in_place": check_in_place,
    "is_": _is,
    "if_stmt": branches.if_stmt,
    "if_exp": branches.if_exp,
    "and_": branches.and_,
    "or_": branches.or_,
    "not_": branches.not_,
    "while_stmt": loops.while_stmt,
    "for_stmt": loops.for_stmt,
    "format_string": printing.format_string,
    "format_percent": printing.format_percent,
}
# The operators that converted code calls for statements and expressions.
OPERATORS = SimpleNamespace(
    NotReturned=NotReturned,
    **{name: _recorded(operator) for name, operator in _OPERATORS.items()},
)


# --- functions, converted

_converted: "weakref.WeakKeyDictionary[FunctionType, FunctionType | None]" = (
    weakref.WeakKeyDictionary()
)
_made: "weakref.WeakSet[FunctionType]" = weakref.WeakSet()


def converted(function: FunctionType) -> FunctionType | None:
    """The converted function, made once; None if it cannot be converted."""
    if function in _made:
        return function
    if function not in _converted:
        try:
            _converted[function] = made = convert(function, OPERATORS)
            _made.add(made)
        except Unconvertible as error:
            _converted[function] = None
            conversion = current()
            if conversion is not None:
                conversion.failures[function.__qualname__] = str(error)
    return _converted[function]


def _callback(value: Any) -> Any:
    """A callback passed to a library, converted if it is the user's."""
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
