# SPDX-License-Identifier: Apache-2.0
"""Tell the user's code from libraries: only the user's functions are converted."""

import inspect
import sys
import sysconfig
import traceback
from collections.abc import Mapping
from contextlib import suppress
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import jax

from tessera.graph.tracer.control_flow.conversion_state import current
from tessera.jax_compat import equation_lines

_JITTED: Any = type(jax.jit(len))
_LIBRARIES = tuple(
    {
        sysconfig.get_path(name)
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
    }
)


def is_user_function(function: FunctionType) -> bool:
    """Whether a function is the user's, and not a library's."""
    return is_user_code(function.__code__, {"__name__": function.__module__})


def is_user_code(code: CodeType, variables: Mapping[str, Any]) -> bool:
    """Whether code is the user's, by its file and its module's global variables."""
    package = (variables.get("__name__") or "").partition(".")[0]
    return _is_of_user(package, code.co_filename)


def is_user_module(name: object) -> bool:
    """Whether the name of a module is that of one of the user's.

    Classes of extension modules may have anything as their ``__module__``.
    """
    if not isinstance(name, str):
        return False
    package = name.partition(".")[0]
    if package in sys.stdlib_module_names:
        return name == "__main__"
    path = getattr(sys.modules.get(name), "__file__", None) or ""
    return _is_of_user(package, path)


def _is_of_user(package: str, path: str) -> bool:
    """Whether a file is installed nowhere, or in the traced function's package."""
    if equation_lines.is_library_code(path) or package == "tessera":
        return False
    conversion = current()
    is_traced = (
        conversion is not None and bool(package) and package == conversion.package
    )
    return is_traced or not path.startswith(_LIBRARIES)


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
    if isinstance(function, FunctionType) and is_user_function(function):
        return function, bound
    return None, ()


def prints(function: Any, seen: set[int] | None = None) -> bool:
    """Whether a function names ``print``, or one of those does that it names.

    Those are global variables, functions of modules, and what it closes over.
    """
    seen = set[int]() if seen is None else seen
    target, bound = target_of(inspect.unwrap(function))
    if target is None or id(target) in seen:
        return False
    seen.add(id(target))
    names, known = _names_in(target.__code__), target.__globals__
    if "print" in names and known.get("print", print) is print:
        return True
    variables = [known[name] for name in names if name in known]
    with suppress(ValueError):  # one is not assigned yet
        variables += inspect.getclosurevars(target).nonlocals.values()
    for variable in (*bound, *variables):
        # Not by ``getattr``: a module may warn or import when it is asked for a name.
        members = vars(variable) if isinstance(variable, ModuleType) else {}
        named = [members[name] for name in names if name in members]
        if any(prints(each, seen) for each in (*named, variable) if callable(each)):
            return True
    return False


def _names_in(code: CodeType) -> set[str]:
    """The names in some code, nested functions included."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return set(code.co_names).union(*map(_names_in, inner))


def line_of(error: BaseException) -> tuple[str, str]:
    """``file.py:12`` of the user's line that an error is from, and its text."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [
        frame for frame in frames if not equation_lines.is_library_code(frame.filename)
    ]
    if not users:
        return "an unknown line", ""
    return f"{users[-1].filename}:{users[-1].lineno}", users[-1].line or ""


def user_line() -> str:
    """``file.py:12`` of the user's line that is being run."""
    frame = sys._getframe(1)
    while frame is not None:
        if not equation_lines.is_library_code(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown line"
