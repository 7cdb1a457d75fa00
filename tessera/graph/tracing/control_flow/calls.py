# SPDX-License-Identifier: Apache-2.0
"""What converted code calls: functions, operators, and built-in functions.

A call of a user's function calls it converted; a library's is called as it is, and the
user's functions that it is handed are converted.
"""

import functools
import inspect
import operator
import weakref
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import jax.numpy as jnp

from tessera import _jax, _jax_traces
from tessera.errors import BranchError
from tessera.graph.tracing.control_flow import branches, loops, printing
from tessera.graph.tracing.control_flow.source import Unconvertible, convert
from tessera.graph.tracing.control_flow.state import NotReturned, Undefined
from tessera.graph.tracing.control_flow.steering import current, is_users, target_of

# --- the operators that converted code calls


class _FunctionScope:
    """The body of a converted function."""

    def __init__(self, function_name: str, name: str, options: None) -> None:
        del options
        self.function_name, self.name = function_name, name

    def __enter__(self) -> "_FunctionScope":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def ret(self, value: Any, returned: Any) -> Any:
        """What the function returns."""
        if isinstance(value, NotReturned):
            return None
        if isinstance(returned, _jax.Tracer) and value is not None:
            raise BranchError(
                f"{self.function_name!r} returns a value on one way through it, and "
                "None on another",
                got="a `return` in a branch or a loop, and no `return` at the end",
                fix="return a value of the same type at the end",
            )
        return value


def _with_function_scope(body: Callable[[Any], Any], name: str, options: None) -> Any:
    with _FunctionScope("<lambda>", name, options) as function_scope:
        return body(function_scope)


def _load(value: Any) -> Any:
    return value.read() if isinstance(value, Undefined) else value


def _load_or_undefined(load: Callable[[], Any], name: str) -> Any:
    try:
        return load()
    except (LookupError, AttributeError, NameError, TypeError):
        return Undefined(name)


def _mark_converted(function: Any) -> Any:
    function.__tessera_converted__ = True
    return function


def converted_call(
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    caller: Any = None,
) -> Any:
    """Call what a converted function calls."""
    kwargs = kwargs or {}
    if isinstance(function, functools.partial):
        kwargs = {**function.keywords, **kwargs}
        return converted_call(function.func, (*function.args, *args), kwargs, caller)
    if caller is not None and any(
        map(functools.partial(operator.is_, function), _FRAMES)
    ):
        return _in_frame_of(caller, function, args)
    builtin = _builtin(function)
    if builtin is not None:
        return builtin(*args, **kwargs)
    target, bound = target_of(function)
    made = None if target is None else converted(target)
    if made is not None:
        return made(*bound, *args, **kwargs)
    args = tuple(map(_callback, args))
    return function(*args, **{name: _callback(v) for name, v in kwargs.items()})


_FRAMES = (super, eval, globals, locals)


def _in_frame_of(caller: Any, function: Any, args: tuple[Any, ...]) -> Any:
    """What depends on the frame that it is called from."""
    from malt.operators import py_builtins

    if function is super:
        return py_builtins.super_in_original_context(super, args, caller)
    if function is eval:
        return py_builtins.eval_in_original_context(eval, args, caller)
    if function is locals:
        return py_builtins.locals_in_original_context(caller)
    return py_builtins.globals_in_original_context(caller)


def _builtin(function: Any) -> Callable[..., Any] | None:
    """Ours of a built-in function that traced values are to be given to."""
    if inspect.isbuiltin(function) or isinstance(function, type):
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str):
            is_format = function.__name__ == "format"
            return printing.format_method(owner) if is_format else None
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
        return functools.reduce(lambda a, b: pair(lambda: a, lambda: b), values)

    return over


_BUILTINS: dict[Any, Callable[..., Any]] = {
    print: printing.print_,
    str: printing.str_,
    range: loops.range_,
    enumerate: loops.enumerate_,
    zip: loops.zip_,
    reversed: loops.reversed_,
    len: loops.len_,
    int: _number(int),
    float: _number(float),
    bool: _number(bool),
    max: _extreme(max, jnp.maximum),
    min: _extreme(min, jnp.minimum),
    all: _quantifier(all, branches.and_),
    any: _quantifier(any, branches.or_),
}

OPERATORS = SimpleNamespace(
    FunctionScope=_FunctionScope,
    with_function_scope=_with_function_scope,
    autograph_artifact=_mark_converted,
    converted_call=converted_call,
    if_stmt=branches.if_stmt,
    if_exp=branches.if_exp,
    and_=branches.and_,
    or_=branches.or_,
    not_=branches.not_,
    while_stmt=loops.while_stmt,
    for_stmt=loops.for_stmt,
    format_string=printing.format_string,
    ld=_load,
    ldu=_load_or_undefined,
    Undefined=Undefined,
    UndefinedReturnValue=NotReturned,
)


# --- functions, converted

_converted: "weakref.WeakKeyDictionary[FunctionType, FunctionType | None]" = (
    weakref.WeakKeyDictionary()
)


def converted(function: FunctionType) -> FunctionType | None:
    """A function, converted; itself where it is already; None where it cannot be."""
    if getattr(function, "__tessera_converted__", False):
        return function
    if function not in _converted:
        try:
            _converted[function] = _mark_converted(convert(function, OPERATORS))
        except Unconvertible as error:
            _converted[function] = None
            conversion = current()
            if conversion is not None:
                conversion.failures[function.__qualname__] = str(error)
    return _converted[function]


def _callback(value: Any) -> Any:
    """A function that is handed to a library, converted."""
    if isinstance(value, FunctionType) and is_users(value):
        return converted(value) or value
    return value
