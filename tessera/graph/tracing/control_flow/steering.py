# SPDX-License-Identifier: Apache-2.0
"""When functions are converted, and which.

A function is traced as it is. Only where a traced value steers Python, or where it
prints, is it traced with its source converted, and then so are the functions that it
calls. Libraries are not.
"""

import functools
import inspect
import sysconfig
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import jax

from tessera import _jax, scope
from tessera.errors import ControlFlowError

_Result = TypeVar("_Result")

_JITTED: Any = type(jax.jit(len))

# What JAX raises where Python asks a traced value for its number.
_STEERED = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerBoolConversionError,
    jax.errors.TracerIntegerConversionError,
)

# What it raises where Python asks for the truth of several.
_AMBIGUOUS = "The truth value of an array with more than one element is ambiguous"

# Functions that were converted before: they need not be tried as they are.
_steered: "weakref.WeakSet[Any]" = weakref.WeakSet()


@dataclass
class Conversion:
    """A trace whose functions are converted.

    Attributes:
      package: The top-level package of the function that is traced.
      failures: Functions that could not be, and why.
    """

    package: str
    failures: dict[str, str] = field(default_factory=dict)


_open: ContextVar[Conversion | None] = ContextVar("tessera_conversion", default=None)


def current() -> Conversion | None:
    """The conversion of the function that is being traced, if it is converted."""
    return _open.get()


@contextmanager
def opened(conversion: Conversion | None) -> Iterator[None]:
    """Let functions that are called be converted, or not."""
    token = _open.set(conversion)
    try:
        with scope.calling(None if conversion is None else _converted):
            yield
    finally:
        _open.reset(token)


def _converted(function: Callable[..., Any]) -> Callable[..., Any]:
    """A user's function that is called in the middle of a conversion."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        from tessera.graph.tracing.control_flow.calls import converted_call

        return converted_call(function, args, kwargs)

    return run


def with_control_flow(
    run: Callable[[], _Result], function: Callable[..., Any], given: Iterable[Any]
) -> _Result:
    """Trace a function as it is; where that cannot be done, with its source converted.

    Args:
      run: Traces it.
      function: The user's function.
      given: Values that it is given beside arrays, functions among them.

    Raises:
      ControlFlowError: [T319] the trace meets what cannot be converted.
    """
    if function not in _steered and not any(map(prints, (function, *given))):
        try:
            with opened(None):
                return run()
        except Exception as error:
            if not _is_steered(error):
                raise
            _steered.add(function)
    module = getattr(function, "__module__", None) or ""
    conversion = Conversion(module.partition(".")[0])
    try:
        with opened(conversion):
            return run()
    except _STEERED as error:
        raise _unsupported(error, conversion) from error


def _is_steered(error: Exception) -> bool:
    return isinstance(error, _STEERED) or str(error).startswith(_AMBIGUOUS)


def _unsupported(error: Exception, conversion: Conversion) -> ControlFlowError:
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if not _jax.is_machinery(frame.filename)]
    where = f" at {users[-1].filename}:{users[-1].lineno}" if users else ""
    line = f"\nin: {users[-1].line}" if users and users[-1].line else ""
    runs_plainly = "".join(
        f"\n{name} runs as it is: {why}" for name, why in conversion.failures.items()
    )
    return ControlFlowError(
        f"Python needs a value{where} that is only known when the program runs",
        got=str(error).strip().partition("\n")[0] + line + runs_plainly,
        fix="use `if`, `while` or `for` in a function that is defined in a file, or "
        "jnp.where, jax.lax.cond and jax.lax.while_loop\n"
        "a setting that Python decides on has to be a Python value, not an array",
    )


# --- which functions are the user's


def target_of(function: Any) -> tuple[FunctionType | None, tuple[Any, ...]]:
    """The user's function that a call runs, and what it is bound to."""
    bound: tuple[Any, ...] = ()
    if isinstance(function, _JITTED):  # in a trace it is that function all the same
        function = function.__wrapped__
    if not isinstance(function, (FunctionType, MethodType, type)):
        own_call = inspect.getattr_static(type(function), "__call__", None)
        if isinstance(own_call, FunctionType):
            function, bound = own_call, (function,)
    elif isinstance(function, MethodType):
        function, bound = function.__func__, (function.__self__,)
    if isinstance(function, FunctionType) and is_users(function):
        return function, bound
    return None, ()


_LIBRARIES = tuple(
    {
        sysconfig.get_path(name)
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
    }
)


def is_users(function: FunctionType) -> bool:
    """Whether a function is the user's own, and no library's."""
    path = function.__code__.co_filename
    conversion = _open.get()
    module = function.__module__ or ""
    if _jax.is_machinery(path) or module.partition(".")[0] == "tessera":
        return False
    if conversion is not None and module.partition(".")[0] == conversion.package:
        return True
    return not path.startswith(_LIBRARIES)


def free_variables(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function closes over, with the names that it has there."""
    cells: tuple[CellType, ...] = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        yield name, value


# --- whether a function prints


def prints(function: Any, seen: set[int] | None = None) -> bool:
    """Whether a function calls ``print``, or one of those that it calls by name."""
    seen = set() if seen is None else seen
    function = getattr(function, "body", function)
    if isinstance(function, functools.partial):
        function = function.func
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is not None and prints(wrapped, seen):
        return True
    target, _ = target_of(function)
    if target is None or id(target) in seen:
        return False
    seen.add(id(target))
    names = set(_names(target.__code__))
    known = target.__globals__
    if "print" in names and known.get("print", print) is print:
        return True
    called = [known[name] for name in names if name in known]
    called += [value for _, value in free_variables(target)]
    for value in called:
        if isinstance(value, ModuleType):
            there = [getattr(value, name, None) for name in names]
            if any(
                prints(each, seen) for each in there if isinstance(each, FunctionType)
            ):
                return True
        elif callable(value) and prints(value, seen):
            return True
    return False


def _names(code: Any) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if hasattr(constant, "co_names"):
            yield from _names(constant)
