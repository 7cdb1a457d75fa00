# SPDX-License-Identifier: Apache-2.0
"""A function's source, converted: its ``if`` s, loops and calls become calls of ours.

The library diastatic-malt, AutoGraph without TensorFlow, rewrites the syntax tree. What
it makes is compiled with the file and the lines of the original, so tracebacks,
debuggers and the source lines in JAX's programs are the user's own.
"""

import __future__

import ast
import functools
import inspect
import linecache
import re
import threading
import weakref
from copy import deepcopy
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any, TypeGuard

_FUTURE = sum(getattr(__future__, name).compiler_flag for name in ("annotations",))
_NAMESPACE = "ag__"  # what malt calls the operators in the code that it makes
_lock = threading.RLock()
_factories: "weakref.WeakKeyDictionary[CodeType, FunctionType]" = (
    weakref.WeakKeyDictionary()
)


class Unconvertible(Exception):
    """Why a function cannot be converted, in words."""


def convert(function: FunctionType, operators: SimpleNamespace) -> FunctionType:
    """The function with its control flow as calls of ``operators``.

    Closure, globals and defaults are shared with the original.

    Raises:
      Unconvertible: Its source is not to be had, or has what cannot be converted.
    """
    code = function.__code__
    with _lock:
        if code not in _factories:
            _factories[code] = _factory(function)
        factory = _factories[code]
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


_BLOCK = re.compile(r"(if|else|loop)_body|(loop|extra)_test|(get|set)_state")


def _named(code: CodeType, name: str, path: str) -> CodeType:
    """Code under another name; a block in it has the name of its function."""

    def inner(constant: Any) -> Any:
        if not isinstance(constant, CodeType):
            return constant
        if _BLOCK.match(constant.co_name):
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
    definition = _definition(function)
    if any(isinstance(node, ast.Match) for node in ast.walk(definition)):
        raise Unconvertible("it has a match statement")
    definition = _plain(definition)
    converted, name = _malt_conversion(function, definition)
    if isinstance(converted, ast.expr):
        converted = ast.Assign([ast.Name(name, ast.Store())], converted)
    module = ast.parse(_FACTORY.format(namespace=_NAMESPACE, name=name))
    outer = module.body[0]
    assert isinstance(outer, ast.FunctionDef)
    inner = outer.body[0]
    assert isinstance(inner, ast.FunctionDef)
    inner.body.insert(0, converted)
    # The names that the function closes over have to be locals around the factory.
    outer.body[:0] = [
        ast.Assign([ast.Name(free, ast.Store())], ast.Constant(None))
        for free in code.co_freevars
    ]
    _place(module, (code.co_firstlineno, 0, code.co_firstlineno, 0))
    flags = code.co_flags & _FUTURE
    made: dict[str, Any] = {}
    exec(compile(module, code.co_filename, "exec", flags, True), made)
    return made["outer_factory"]()


_FACTORY = """
def outer_factory():
    def inner_factory({namespace}):
        return {name}
    return inner_factory
"""


def _malt_conversion(
    function: FunctionType, definition: ast.FunctionDef | ast.Lambda
) -> tuple[Any, str]:
    """The tree that malt makes of a definition, and what it calls it."""
    from malt.core import converter
    from malt.pyct import errors, inspect_utils, naming, transformer

    namer = naming.Namer(inspect_utils.getnamespace(function))
    is_lambda = isinstance(definition, ast.Lambda)
    plain = "lambda" if is_lambda else definition.name
    name = namer.new_symbol(f"{_NAMESPACE}{plain}", ())
    info = transformer.EntityInfo(
        name=name,
        source_code="",
        source_file=function.__code__.co_filename,
        future_features=(),
        namespace={},
    )
    options = _transpiler().options
    context = transformer.Context(info, namer, converter.ProgramContext(options))
    try:
        converted = _transpiler().transform_ast(definition, context)
    except errors.PyCTError as error:
        raise Unconvertible(str(error).partition("\n")[0]) from error
    except (AssertionError, AttributeError, NotImplementedError, ValueError) as error:
        # How malt says that it does not know a kind of statement.
        raise Unconvertible(f"it has a statement that is not known: {error}") from error
    if not is_lambda:
        converted.name = name
    return converted, name


@functools.cache
def _transpiler() -> Any:
    """Malt's own transpiler, with its variables told apart as Tessera needs them."""
    from malt.converters import (
        break_statements,
        call_trees,
        conditional_expressions,
        continue_statements,
        control_flow,
        functions,
        logical_expressions,
        return_statements,
        variables,
    )
    from malt.core import converter, unsupported_features_checker
    from malt.impl import api
    from malt.pyct import cfg, parser, qual_names
    from malt.pyct.static_analysis import (
        activity,
        liveness,
        reaching_definitions,
        reaching_fndefs,
    )

    class Options(converter.ConversionOptions):
        """Options that leave no trace in the code that is made."""

        def to_ast(self) -> ast.expr:
            return parser.parse_expression("None")

        def call_options(self) -> "Options":
            return self

    class Blocks(control_flow.ControlFlowTransformer):
        """Only names are variables of a block; containers are compared as they run."""

        def _get_block_composite_vars(self, modified: Any, live_in: Any) -> Any:
            del modified, live_in
            return frozenset()

        def _get_block_vars(self, node: Any, modified: Any) -> Any:
            """What is not local may be used anywhere: no block leaves it dead."""
            names, undefined, count = super()._get_block_vars(node, modified)
            scope = self.state[control_flow._Function].scope
            outer = sorted(modified & (scope.nonlocals | scope.globals))
            live = outer + [name for name in names[:count] if name not in outer]
            dead = [name for name in names[count:] if name not in outer]
            return live + dead, undefined, len(live)

    class Transpiler(api.PyToPy):
        options = Options(
            recursive=True, optional_features=(converter.Feature.BUILTIN_FUNCTIONS,)
        )

        def transform_ast(self, node: Any, ctx: Any) -> Any:
            unsupported_features_checker.verify(node)
            node = self.initial_analysis(node, ctx)
            for step in (
                functions,
                break_statements,
                continue_statements,
                return_statements,
                call_trees,
            ):
                node = step.transform(node, ctx)
            graphs = cfg.build(node)
            node = qual_names.resolve(node)
            node = activity.resolve(node, ctx, None)
            node = reaching_definitions.resolve(node, ctx, graphs)
            node = reaching_fndefs.resolve(node, ctx, graphs)
            node = liveness.resolve(node, ctx, graphs)
            node = Blocks(ctx).visit(node)
            for step in (conditional_expressions, logical_expressions, variables):
                node = step.transform(node, ctx)
            return node

    return Transpiler()


# --- finding a definition in its file


@functools.lru_cache(maxsize=8)
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


def _parsed_block(lines: list[str], first: int) -> ast.Module:
    """The block that begins at a line of a file that is not all Python, with its place.

    A page of documentation is such a file.
    """
    block = "".join(inspect.getblock(lines[first - 1 :]))
    indented = block[:1].isspace()
    try:
        tree = ast.parse("if True:\n" * indented + block)
    except SyntaxError as error:
        raise Unconvertible(f"its source does not parse: {error.msg}") from error
    return ast.increment_lineno(tree, first - 1 - indented)


def _definition(function: FunctionType) -> ast.FunctionDef | ast.Lambda:
    """A copy of the definition of a function in the file that it comes from."""
    code = function.__code__
    lines = linecache.getlines(code.co_filename, function.__globals__)
    if not lines:
        raise Unconvertible(f"its source is not to be had, from {code.co_filename}")
    try:
        tree = _parsed("".join(lines))
    except SyntaxError:
        tree = _parsed_block(lines, code.co_firstlineno)
    found = [node for node in ast.walk(tree) if _is_of(node, code)]
    if len(found) > 1:  # lambdas of one line
        found = [node for node in found if _spans(node, code)] or found
    if len(found) != 1:
        raise Unconvertible(
            f"line {code.co_firstlineno} of {code.co_filename} has {len(found)} "
            f"definitions like it"
        )
    return deepcopy(found[0])


def _is_of(node: ast.AST, code: CodeType) -> TypeGuard[ast.FunctionDef | ast.Lambda]:
    """Whether a node is the definition that some code was compiled from."""
    if isinstance(node, ast.FunctionDef):
        first = node.decorator_list[0] if node.decorator_list else node
        if node.name != code.co_name or first.lineno != code.co_firstlineno:
            return False
    elif isinstance(node, ast.Lambda):
        if code.co_name != "<lambda>" or node.lineno != code.co_firstlineno:
            return False
    else:
        return False
    names = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    count = code.co_argcount + code.co_kwonlyargcount
    return [name.arg for name in names] == list(code.co_varnames[:count])


def _spans(node: ast.AST, code: CodeType) -> bool:
    """Whether all of some code lies in the body of a lambda."""
    assert isinstance(node, ast.Lambda)
    body = node.body
    start, end = (body.lineno, body.col_offset), (body.end_lineno, body.end_col_offset)
    return all(
        start <= (line, column) <= end
        for line, _, column, _ in code.co_positions()
        if line is not None and column is not None and (line, column) > (start[0], 0)
    )


# --- before and after malt


def _plain(
    definition: ast.FunctionDef | ast.Lambda,
) -> ast.FunctionDef | ast.Lambda:
    """The definition as malt is to have it, every node with its place."""
    from malt.pyct import anno

    for node in ast.walk(definition):
        if hasattr(node, "lineno"):
            anno.setanno(node, anno.Basic.ORIGIN, _Place(node))
    arguments = definition.args
    # Both were evaluated when the function was defined, and may not be again.
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [d and ast.Constant(None) for d in arguments.kw_defaults]
    for node in ast.walk(definition):
        if isinstance(node, ast.arg):
            node.annotation = None
    if isinstance(definition, ast.FunctionDef):
        definition.returns = None
    return _Formatted().visit(definition)


class _Place:
    """Where a node stands in the user's file; malt carries it along."""

    def __init__(self, node: Any) -> None:
        self.loc = self
        self.lineno, self.col_offset = node.lineno, node.col_offset
        # Of a statement with a body, the head: what stands for it is called there.
        head = getattr(node, "test", getattr(node, "iter", None))
        last = head if hasattr(node, "body") and head is not None else node
        end = last.end_lineno, last.end_col_offset
        if isinstance(node, ast.stmt) and end[0] != node.lineno:
            end = node.lineno, node.col_offset
        self.span = (node.lineno, node.col_offset, *end)


class _Formatted(ast.NodeTransformer):
    """f-strings become calls, so that a traced value in one is known when it runs."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        self.generic_visit(node)
        parts = [
            ast.Tuple(
                [
                    part.value,
                    ast.Constant(chr(part.conversion) if part.conversion > 0 else ""),
                    part.format_spec or ast.Constant(""),
                ],
                ast.Load(),
            )
            if isinstance(part, ast.FormattedValue)
            else part
            for part in node.values
        ]
        target = ast.Attribute(
            ast.Name(_NAMESPACE, ast.Load()), "format_string", ast.Load()
        )
        return ast.copy_location(ast.Call(target, parts, []), node)


def _place(tree: ast.AST, place: tuple[int, ...]) -> None:
    """Give every node the place of the user's node that it comes from."""
    from malt.pyct import anno

    waiting = [(tree, place)]
    while waiting:
        node, place = waiting.pop()
        origin: Any = anno.getanno(node, anno.Basic.ORIGIN, default=None)
        if origin is not None:
            place = origin.span
        if "lineno" in node._attributes:
            node.lineno, node.col_offset = place[0], place[1]  # type: ignore[attr-defined]
            node.end_lineno, node.end_col_offset = place[2], place[3]  # type: ignore[attr-defined]
        waiting += [(child, place) for child in ast.iter_child_nodes(node)]
