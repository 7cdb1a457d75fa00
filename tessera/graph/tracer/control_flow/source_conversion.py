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
from types import CellType, CodeType, FunctionType
from typing import Any

from tessera.graph.tracer.control_flow.function_source import (
    AssignsOutside,
    Unconvertible,
    definition_of,
)
from tessera.graph.tracer.control_flow.insert_operators import InsertOperators
from tessera.graph.tracer.control_flow.lower_jumps import (
    PREFIX,
    lower_jumps,
    parse_at,
)

_FUTURE = sum(getattr(__future__, name).compiler_flag for name in ("annotations",))
_lock = threading.RLock()
# By file as well: equal source on equal lines of two files makes equal code objects.
_codes: dict[str, "weakref.WeakKeyDictionary[CodeType, CodeType]"] = (
    collections.defaultdict(weakref.WeakKeyDictionary)
)


def convert(function: FunctionType, operators: Any) -> FunctionType:
    """The function with its control flow as calls of ``operators``.

    Closure, globals and defaults are shared with the original.

    Raises:
      Unconvertible: Its source is missing, or cannot be converted.
      AssignsOutside: It, or code in it, assigns a variable that is not its own.
    """
    code = function.__code__
    with _lock:
        known = _codes[code.co_filename]
        if code not in known:
            known[code] = _converted_code(function)
        converted = known[code]
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    cells[PREFIX] = CellType(operators)
    made = FunctionType(
        _named(converted, code.co_name, code.co_qualname),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        tuple(cells[name] for name in converted.co_freevars),
    )
    made.__kwdefaults__ = function.__kwdefaults__
    made.__qualname__ = function.__qualname__
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


def _converted_code(function: FunctionType) -> CodeType:
    """The code of a converted function, which closes over the operators, too."""
    code = function.__code__
    if inspect.iscoroutinefunction(function):
        raise Unconvertible("it is async")
    found, owner = definition_of(function)
    for node in ast.walk(found):
        names = node.names if isinstance(node, ast.Global | ast.Nonlocal) else ()
        for name in names:
            if isinstance(node, ast.Global) or name in code.co_freevars:
                raise AssignsOutside(name)
    if inspect.isgeneratorfunction(function):
        raise Unconvertible("it is a generator")
    definition = _plain(found)
    lower_jumps(definition)
    InsertOperators(definition).insert()
    # What it closes over are local variables around it. The compiler gives private
    # names those of the class around it, whatever underscores begin the class's name.
    around = ", ".join((PREFIX, *code.co_freevars))
    text = f"def around({around}):\n  class _____{owner.lstrip('_')}: pass"
    module = ast.parse(text if owner.strip("_") else text.partition("\n")[0] + " pass")
    inner: Any = module.body[0]
    if owner.strip("_"):
        inner = inner.body[0]
    inner.body = [definition]
    ast.fix_missing_locations(module)
    flags = code.co_flags & _FUTURE
    compiled = compile(module, code.co_filename, "exec", flags, True)
    while compiled.co_name != definition.name:
        codes = [each for each in compiled.co_consts if isinstance(each, CodeType)]
        (compiled,) = codes
    return compiled


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
