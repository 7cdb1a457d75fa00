# SPDX-License-Identifier: Apache-2.0
"""Convert a function's source: its control flow becomes calls of operators.

The converted function is compiled with the file and the lines of the original, so
tracebacks, debuggers and the source lines of JAX programs show the user's code.
"""

import __future__

import ast
import collections
import inspect
import threading
import weakref
from types import CodeType, FunctionType
from typing import Any

from tessera.compiler.trace.control_flow.function_source import (
    Unconvertible,
    definition_of,
)
from tessera.compiler.trace.control_flow.insert_operators import InsertOperators
from tessera.compiler.trace.control_flow.lower_jumps import (
    PREFIX,
    lower_jumps,
    parse_at,
)

_FUTURE = sum(getattr(__future__, name).compiler_flag for name in ("annotations",))
_lock = threading.RLock()
# By file as well: equal source on equal lines of two files makes equal code objects.
_factories: dict[str, "weakref.WeakKeyDictionary[CodeType, FunctionType]"] = (
    collections.defaultdict(weakref.WeakKeyDictionary)
)


def convert(function: FunctionType, operators: Any) -> FunctionType:
    """The function with its control flow as calls of ``operators``.

    Closure, globals and defaults are shared with the original.

    Raises:
      Unconvertible: Its source is missing, or cannot be converted.
    """
    code = function.__code__
    with _lock:
        known = _factories[code.co_filename]
        if code not in known:
            known[code] = _factory(function)
        factory = known[code]
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    closure = tuple(cells[name] for name in factory.__code__.co_freevars)
    bound = FunctionType(
        factory.__code__, function.__globals__, factory.__name__, None, closure
    )
    made = bound(operators)
    made.__defaults__ = function.__defaults__
    made.__kwdefaults__ = function.__kwdefaults__
    made.__code__ = _named(made.__code__, code.co_name, code.co_qualname)
    made.__name__, made.__qualname__ = function.__name__, function.__qualname__
    return made


def _named(code: CodeType, name: str, path: str) -> CodeType:
    """Code under another name; a block in it has the name of its function."""

    def inner(constant: Any) -> Any:
        if not isinstance(constant, CodeType):
            return constant
        if constant.co_name.startswith(PREFIX):
            return _named(constant, name, path)
        own = constant.co_name
        return _named(constant, own, f"{path}.<locals>.{own}")

    constants = tuple(map(inner, code.co_consts))
    return code.replace(co_name=name, co_qualname=path, co_consts=constants)


def _factory(function: FunctionType) -> FunctionType:
    """A function that makes the converted function from the operators."""
    code = function.__code__
    if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
        kind = "a generator" if inspect.isgeneratorfunction(function) else "async"
        raise Unconvertible(f"it is {kind}")
    definition = _plain(definition_of(function))
    lower_jumps(definition)
    InsertOperators(definition, code.co_freevars).insert()
    module = ast.parse(_FACTORY)
    outer = module.body[0]
    assert isinstance(outer, ast.FunctionDef)
    inner = outer.body[0]
    assert isinstance(inner, ast.FunctionDef)
    inner.body.insert(0, definition)
    # The names that the function closes over have to be locals around the factory.
    outer.body[:0] = [
        ast.Assign([ast.Name(free, ast.Store())], ast.Constant(None), lineno=1)
        for free in code.co_freevars
    ]
    ast.fix_missing_locations(module)
    flags = code.co_flags & _FUTURE
    made: dict[str, Any] = {}
    exec(compile(module, code.co_filename, "exec", flags, True), made)
    return made["outer_factory"]()


_FACTORY = f"""
def outer_factory():
    def inner_factory({PREFIX}):
        return {PREFIX}function
    return inner_factory
"""


def _plain(definition: ast.FunctionDef | ast.Lambda) -> ast.FunctionDef:
    """A definition without defaults and annotations, which were evaluated already."""
    arguments = definition.args
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [d and ast.Constant(None) for d in arguments.kw_defaults]
    for node in ast.walk(arguments):
        if isinstance(node, ast.arg):
            node.annotation = None
    (made,) = parse_at(f"def {PREFIX}function(): pass", definition)
    assert isinstance(made, ast.FunctionDef)
    made.args = arguments
    if isinstance(definition, ast.FunctionDef):
        made.body = definition.body
    else:
        made.body = [ast.copy_location(ast.Return(definition.body), definition.body)]
    return made
