# SPDX-License-Identifier: Apache-2.0
"""Replace control flow and calls by calls of operators that take traced values.

    if x > 0:          def tessera__if(): nonlocal y; y = tessera__.call(f, (x,), {})
        y = f(x)       def tessera__else(): pass
                       def tessera__get(): return (y,)
                       def tessera__put(values): nonlocal y; (y,) = values
                       tessera__.if_stmt(x > 0, …)

Every variable that a block assigns is one of the block's, whether or not it is read
afterwards. Functions and classes inside a function are left as they are: they are
converted when they are called.
"""

import ast
from collections.abc import Iterable, Sequence

from tessera.compiler.trace.control_flow.function_source import Unconvertible
from tessera.compiler.trace.control_flow.liveness import Liveness, assigned_names
from tessera.compiler.trace.control_flow.lower_jumps import (
    PREFIX,
    parse_at,
    walk_scope,
)

# Calls of these by name depend on the function that they stand in.
_FRAME_READERS = ("locals", "eval", "exec", "vars", "dir")
_LOOPS = (ast.For, ast.While)


class InsertOperators(ast.NodeTransformer):
    """Inserts the operators into one function whose jumps are lowered.

    Args:
      definition: The function.
      free: The variables that it closes over.

    Raises:
      Unconvertible: It asks for its own local variables.
    """

    def __init__(self, definition: ast.FunctionDef, free: Sequence[str]) -> None:
        self._definition, self._free = definition, frozenset(free)
        self._count = 0
        body = list(walk_scope(definition.body))
        self._globals = _declared(body, ast.Global)
        self._beyond = self._globals | _declared(body, ast.Nonlocal)
        blocks = [each for each in body if isinstance(each, (ast.If, *_LOOPS))]
        self._variables = assigned_names(blocks) - self._beyond
        self._live = Liveness(definition)
        arguments = definition.args
        first = [*arguments.posonlyargs, *arguments.args][:1]
        self._first = first[0].arg if first else ""

    def insert(self) -> None:
        """Insert the operators."""
        body = self._block(self._definition.body)
        if self._variables:  # they are the function's own, wherever they are assigned
            names = " = ".join(sorted(self._variables))
            body = [*parse_at(f"if False: {names} = None", body[0]), *body]
        self._definition.body = body

    def _names(self, nodes: Sequence[ast.AST], live: set[str]) -> "_Names":
        self._count += 1
        names = assigned_names(nodes)
        there = names & self._globals
        return _Names(self._count, names - there, there, names - self._beyond, live)

    # --- statements

    def _block(self, statements: Iterable[ast.stmt]) -> list[ast.stmt]:
        found: list[ast.stmt] = []
        for statement in statements:
            made = self.visit(statement)
            found += made if isinstance(made, list) else [made]
        return found

    def visit_If(self, node: ast.If) -> list[ast.stmt]:
        """An ``if``: both branches become functions."""
        block = self._names([*node.body, *node.orelse], self._live.after(node))
        text = f"""
def {block.name("if")}(): pass
def {block.name("else")}(): pass
{block.accessors}
{PREFIX}.if_stmt(None, {block.name("if")}, {block.name("else")}, {block.arguments})
"""
        body, orelse, *rest = parse_at(text, _head(node, node.test))
        _fill(body, [*block.declarations(node), *self._block(node.body)])
        _fill(orelse, [*block.declarations(node), *self._block(node.orelse)])
        _call(rest[-1]).args[0] = self.visit(node.test)
        return [body, orelse, *rest]

    def visit_While(self, node: ast.While) -> list[ast.stmt]:
        """A ``while``: its condition and its body become functions."""
        live = self._live.carried(node)
        block = self._names([node.test, *node.body], live)
        has_effects = any(
            isinstance(n, ast.Call | ast.NamedExpr) for n in ast.walk(node.test)
        )
        functions = f"{block.name('test')}, {block.name('body')}"
        text = f"""
def {block.name("test")}(): pass
def {block.name("body")}(): pass
{block.accessors}
{PREFIX}.while_stmt({functions}, {block.arguments}, {has_effects})
"""
        test, body, *rest = parse_at(text, _head(node, node.test))
        holds = self.visit(_without(_flags(node), node.test))
        _fill(
            test,
            [
                *block.declarations(node),
                ast.copy_location(ast.Return(holds), node.test),
            ],
        )
        _fill(body, [*block.declarations(node), *self._block(node.body)])
        return [test, body, *rest]

    def visit_For(self, node: ast.For) -> list[ast.stmt]:
        """A ``for``: its body becomes a function of the item."""
        live = self._live.carried(node)
        block = self._names([node.target, *node.body], live)
        flags = _flags(node)
        should_continue = block.name("test") if flags else "None"
        text = f"""
def {block.name("test")}(): pass
def {block.name("body")}({PREFIX}item): {PREFIX}target = {PREFIX}item
{block.accessors}
{PREFIX}.for_stmt(None, {should_continue}, {block.name("body")}, {block.arguments})
"""
        test, body, *rest = parse_at(text, _head(node, node.iter))
        assert isinstance(body, ast.FunctionDef)
        (assign,) = body.body
        assert isinstance(assign, ast.Assign)
        ast.copy_location(assign, _head(node, node.target))
        assign.targets = [self.visit(node.target)]
        _fill(body, [*block.declarations(node), assign, *self._block(node.body)])
        _call(rest[-1]).args[0] = self.visit(node.iter)
        if not flags:
            return [body, *rest]
        holds = self.visit(_without(flags))
        _fill(test, [ast.copy_location(ast.Return(holds), node)])
        return [test, body, *rest]

    def visit_AugAssign(self, node: ast.AugAssign) -> list[ast.stmt]:
        """An augmented assignment reads its variable, too."""
        before: list[ast.stmt] = []
        if isinstance(node.target, ast.Name) and node.target.id in self._variables:
            name = node.target.id
            before = parse_at(f"{PREFIX}.load({name})", node)
        return [*before, self.generic_visit(node)]  # type: ignore[list-item]

    def visit_Delete(self, node: ast.Delete) -> list[ast.stmt]:
        """``del`` of a variable that has no value is Python's error."""
        names = [each.id for each in node.targets if isinstance(each, ast.Name)]
        before = [
            each
            for name in names
            if name in self._variables
            for each in parse_at(f"{PREFIX}.load({name})", node)
        ]
        return [*before, self.generic_visit(node)]  # type: ignore[list-item]

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        """Annotations of variables are never evaluated in a function."""
        node.target = self.visit(node.target)
        node.value = node.value and self.visit(node.value)
        return node

    def _own_scope(self, node: ast.AST) -> ast.AST:
        """What is evaluated where a function or a class is defined, not inside it."""
        for name in ("decorator_list", "bases", "keywords"):
            if hasattr(node, name):
                setattr(node, name, [self.visit(each) for each in getattr(node, name)])
        arguments = getattr(node, "args", None)
        if isinstance(arguments, ast.arguments):
            defaults = arguments.kw_defaults
            arguments.defaults = [self.visit(each) for each in arguments.defaults]
            arguments.kw_defaults = [each and self.visit(each) for each in defaults]
        return node

    visit_FunctionDef = visit_ClassDef = visit_Lambda = _own_scope

    # --- expressions

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """A variable of a block may have no value, or none that can be used."""
        if isinstance(node.ctx, ast.Load) and node.id in self._variables | self._free:
            return _operator("load", node, node)
        return node

    def _place(self, node: ast.Attribute | ast.Subscript) -> ast.AST:
        """An attribute or an entry; assignments into it are checked."""
        self.generic_visit(node)
        if not isinstance(node.ctx, ast.Load):
            node.value = _operator("written", node.value, node.value)
        return node

    visit_Attribute = visit_Subscript = _place

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        """``and`` and ``or``: the second operand is a function."""
        if _assigns(node.values[1:]):
            return self.generic_visit(node)
        values = [self.visit(value) for value in node.values]
        name = "and_" if isinstance(node.op, ast.And) else "or_"
        result = values.pop()
        while values:
            result = _operator(name, node, values.pop(), _thunk(result))
        return result

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        """``not``."""
        self.generic_visit(node)
        is_not = isinstance(node.op, ast.Not)
        return _operator("not_", node, node.operand) if is_not else node

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        """``a if c else b``: both branches become functions."""
        ways = [node.body, node.orelse]
        if _assigns(ways):
            return self.generic_visit(node)
        thunks = [_thunk(self.visit(way)) for way in ways]
        return _operator("if_exp", node, self.visit(node.test), *thunks)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        """``a < b < c`` evaluates ``b`` once, and ``c`` only if ``a < b``."""
        if len(node.ops) == 1:
            self.generic_visit(node)
            return _identity(node)
        if _assigns(node.comparators[1:]):
            return self.generic_visit(node)
        self._count += 1
        names = [f"{PREFIX}{side}_{self._count}" for side in ("left", "right")]
        left, right = (ast.Name(name, ast.Load()) for name in names)
        rest = ast.Compare(right, node.ops[1:], node.comparators[1:])
        first = ast.Compare(left, node.ops[:1], [ast.Name(names[1], ast.Load())])
        both = _operator("and_", node, _identity(first), _thunk(self.visit(rest)))
        two = [ast.arg(name) for name in names]
        arguments = ast.arguments([], two, None, [], [], None, [])
        values = [self.visit(node.left), self.visit(node.comparators[0])]
        made = ast.Call(ast.Lambda(arguments, both), values, [])
        return ast.copy_location(made, node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """A call, which may be of a function that has to be converted."""
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name == "super" and not node.args:  # in a block it would not know the method
            names = ("__class__", self._first)
            owner: list[ast.expr] = [ast.Name(each, ast.Load()) for each in names]
            return ast.copy_location(ast.Call(node.func, owner, []), node)
        if name in _FRAME_READERS and not (name in ("vars", "dir") and node.args):
            raise Unconvertible(f"it calls {name}()")
        if isinstance(node.func, ast.Attribute) and _is_ours(node.func.value):
            node.args = [self.visit(each) for each in node.args]
            return node
        is_stop = name == "breakpoint" or getattr(node.func, "attr", "") == "set_trace"
        is_stop = is_stop or name == "globals"
        self.generic_visit(node)
        if is_stop:
            return node
        positional = ast.Tuple(node.args, ast.Load())
        keywords = _operator("keywords", node)
        assert isinstance(keywords, ast.Call)
        keywords.keywords = node.keywords
        return _operator("call", node, node.func, positional, keywords)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        """An f-string, whose values may be known only when the program runs."""
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
        return _operator("format_string", node, *parts)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        """``"%d" % n`` is an f-string in other words."""
        text = node.left
        self.generic_visit(node)
        is_text = isinstance(text, ast.Constant) and isinstance(text.value, str)
        if is_text and isinstance(node.op, ast.Mod):
            return _operator("format_percent", node, node.left, node.right)
        return node


class _Names:
    """The names of the functions made for one block, and the variables they share.

    Args:
      number: Tells the block from others.
      shared: Variables that it assigns and that functions around it have.
      there: Global variables that it assigns.
      own: The variables of its own function among the shared ones.
      live: Variables that may be read afterwards.
    """

    def __init__(
        self,
        number: int,
        shared: set[str],
        there: set[str],
        own: set[str],
        live: set[str],
    ) -> None:
        self._number = number
        self._variables = sorted(own, key=lambda name: (name not in live, name))
        self._num_live = len(own & live)
        pairs = ("nonlocal", shared), ("global", there)
        self._lines = [f"{word} {', '.join(sorted(v))}" for word, v in pairs if v]

    def name(self, part: str) -> str:
        """The name of the function for one part of the block."""
        return f"{PREFIX}{part}_{self._number}"

    def declarations(self, node: ast.AST) -> list[ast.stmt]:
        """The ``nonlocal`` and ``global`` statements of the block's functions."""
        return parse_at("\n".join(self._lines), node)

    @property
    def accessors(self) -> str:
        """The functions that read and write the block's variables."""
        if not self._variables:
            return (
                f"def {self.name('get')}(): return ()\n"
                f"def {self.name('put')}({PREFIX}values): pass\n"
            )
        names = ", ".join(self._variables)
        values = "".join(
            f"{PREFIX}.peek(lambda: {v}, {v!r}), " for v in self._variables
        )
        return (
            f"def {self.name('get')}(): return ({values})\n"
            f"def {self.name('put')}({PREFIX}values):\n"
            f"    nonlocal {names}\n"
            f"    {names}, = {PREFIX}values\n"
        )

    @property
    def arguments(self) -> str:
        """The arguments about the block that every operator takes."""
        functions = f"{self.name('get')}, {self.name('put')}"
        return f"{functions}, {tuple(self._variables)!r}, {self._num_live}"


# --- pieces of syntax trees


def _is_ours(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == PREFIX


def _declared(nodes: Iterable[ast.AST], kind: type) -> set[str]:
    return {name for node in nodes if isinstance(node, kind) for name in node.names}


def _flags(node: ast.For | ast.While) -> list[str]:
    return getattr(node, "flags", [])


def _without(flags: Sequence[str], test: ast.expr | None = None) -> ast.expr:
    """Whether none of some flags holds, and a condition does."""
    negated = [ast.UnaryOp(ast.Not(), ast.Name(flag, ast.Load())) for flag in flags]
    values = [*negated, *([] if test is None else [test])]
    return values[0] if len(values) == 1 else ast.BoolOp(ast.And(), values)


def _head(node: ast.stmt, part: ast.expr) -> ast.stmt:
    """The first line of a statement, as the source location of its operator."""
    same_line = part.end_lineno == node.lineno
    end = part.end_col_offset if same_line else node.col_offset
    return ast.Pass(
        lineno=node.lineno,
        col_offset=node.col_offset,
        end_lineno=node.lineno,
        end_col_offset=end,
    )


def _fill(function: ast.stmt, body: list[ast.stmt]) -> None:
    assert isinstance(function, ast.FunctionDef)
    function.body = body or function.body


def _call(statement: ast.stmt) -> ast.Call:
    assert isinstance(statement, ast.Expr)
    assert isinstance(statement.value, ast.Call)
    return statement.value


def _assigns(nodes: Iterable[ast.AST]) -> bool:
    """Whether an expression assigns a variable, which it could not from a function."""
    return any(isinstance(node, ast.NamedExpr) for node in walk_scope(nodes))


def _identity(node: ast.Compare) -> ast.expr:
    """``a is b``, where whether it is may be known only when the program runs."""
    is_not = isinstance(node.ops[0], ast.IsNot)
    branch_contents = [node.left, *node.comparators]
    if not (is_not or isinstance(node.ops[0], ast.Is)):
        return node
    if any(isinstance(side, ast.Constant) for side in branch_contents):
        return node
    return _operator("is_not" if is_not else "is_", node, *branch_contents)


def _thunk(value: ast.expr) -> ast.expr:
    nothing = ast.arguments([], [], None, [], [], None, [])
    return ast.copy_location(ast.Lambda(nothing, value), value)


def _operator(name: str, node: ast.AST, *arguments: ast.expr) -> ast.expr:
    target = ast.Attribute(ast.Name(PREFIX, ast.Load()), name, ast.Load())
    return ast.copy_location(ast.Call(target, list(arguments), []), node)
