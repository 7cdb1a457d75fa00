# SPDX-License-Identifier: Apache-2.0
"""Replace control flow and calls by calls of operators that take traced values.

    if x > 0:          def tessera__if(): nonlocal y; y = tessera__.call(f, (x,), {})
        y = f(x)       def tessera__else(): pass
                       tessera__.if_stmt(x > 0, tessera__if, tessera__else)

The variables of a block are closure cells of its functions: that is where an operator
reads and writes them. Functions and classes inside a function are left as they are:
they are converted when they are called.
"""

import ast
from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any

from tessera.graph.tracer.control_flow.assigned_names import assigned_names
from tessera.graph.tracer.control_flow.function_source import Unconvertible
from tessera.graph.tracer.control_flow.lower_jumps import (
    PREFIX,
    parse_at,
    walk_scope,
)

# Calls of these by name depend on the function that they stand in.
_FRAME_READERS = ("locals", "eval", "exec", "vars", "dir")
_LOOPS = (ast.For, ast.While)
_EFFECTS = (ast.Call, ast.NamedExpr)  # what may change something when it is evaluated


class InsertOperators(ast.NodeTransformer):
    """Inserts the operators into one function whose jumps are lowered.

    Args:
      definition: The function.
      free: The variables that it closes over.

    Raises:
      Unconvertible: It asks for its own local variables.
    """

    def __init__(self, definition: ast.FunctionDef, free: Sequence[str]) -> None:
        self._definition = definition
        self._count = 0
        body = list(walk_scope(definition.body))
        self._globals = _declared(body, ast.Global)
        blocks = [each for each in body if isinstance(each, (ast.If, *_LOOPS))]
        beyond = self._globals | _declared(body, ast.Nonlocal)
        self._variables = assigned_names(blocks) - beyond
        arguments = definition.args
        every = [each for each in ast.walk(arguments) if isinstance(each, ast.arg)]
        locals_ = assigned_names(definition.body) | {each.arg for each in every}
        self._loaded = (locals_ | {*free}) - self._globals
        first = [*arguments.posonlyargs, *arguments.args][:1]
        self._first = first[0].arg if first else ""

    def insert(self) -> None:
        """Insert the operators."""
        body = self._block(self._definition.body)
        if self._variables:  # they are the function's own, wherever they are assigned
            names = " = ".join(sorted(self._variables))
            body = [*parse_at(f"if False: {names} = None", body[0]), *body]
        self._definition.body = body

    # --- statements

    def _block(self, statements: Iterable[ast.stmt]) -> list[ast.stmt]:
        found: list[ast.stmt] = []
        for statement in statements:
            made = self.visit(statement)
            found += made if isinstance(made, list) else [made]
        return found

    def visit_If(self, node: ast.If) -> list[ast.stmt]:
        """An ``if``: both branches become functions."""
        body = self._function("if", node, node.body)
        orelse = self._function("else", node, node.orelse)
        call = f"{PREFIX}.if_stmt(None, {body.name}, {orelse.name})"
        return [body, orelse, self._call(call, node, node.test, node.test)]

    def visit_While(self, node: ast.While) -> list[ast.stmt]:
        """A ``while``: its condition and its body become functions."""
        holds = ast.Return(_without(_flags(node), node.test))
        test = self._function("test", node, [ast.copy_location(holds, node.test)])
        body = self._function("body", node, node.body)
        call = f"{PREFIX}.while_stmt({test.name}, {body.name})"
        return [test, body, self._call(call, node, node.test)]

    def visit_For(self, node: ast.For) -> list[ast.stmt]:
        """A ``for``: its body becomes a function of the item."""
        _mark_iterated(node.iter)
        item = ast.Name(f"{PREFIX}item", ast.Load())
        target = ast.Assign([node.target], item)
        ast.copy_location(target, _head(node, node.target))
        body = self._function("body", node, [target, *node.body], item.id)
        if not (flags := _flags(node)):
            call = f"{PREFIX}.for_stmt(None, None, {body.name})"
            return [body, self._call(call, node, node.iter, node.iter)]
        holds = ast.copy_location(ast.Return(_without(flags)), node)
        test = self._function("test", node, [holds])
        call = f"{PREFIX}.for_stmt(None, {test.name}, {body.name})"
        return [test, body, self._call(call, node, node.iter, node.iter)]

    def _function(
        self, part: str, node: ast.stmt, body: list[ast.stmt], parameter: str = ""
    ) -> ast.FunctionDef:
        """A function for one part of a statement; what it assigns is not its own."""
        self._count += 1
        names = assigned_names(body)
        pairs = ("nonlocal", names - self._globals), ("global", names & self._globals)
        lines = [f"{word} {', '.join(sorted(each))}" for word, each in pairs if each]
        text = f"def {PREFIX}{part}_{self._count}({parameter}): pass"
        (made,) = parse_at(text, _head(node, node))
        assert isinstance(made, ast.FunctionDef)
        if body:
            declarations = parse_at("\n".join(lines), node)
            made.body = [*declarations, *self._block(body)]
        return made

    def _call(
        self, text: str, node: ast.stmt, part: ast.expr, value: ast.expr | None = None
    ) -> ast.stmt:
        """The call of an operator; a value, converted, is its first argument."""
        (made,) = parse_at(text, _head(node, part))
        assert isinstance(made, ast.Expr)
        assert isinstance(made.value, ast.Call)
        if value is not None:
            made.value.args[0] = self.visit(value)
        return made

    def visit_Delete(self, node: ast.Delete) -> list[ast.stmt]:
        """``del`` reads a variable without naming it in an expression."""
        names = {each.id for each in node.targets if isinstance(each, ast.Name)}
        loads = [f"{PREFIX}.load({name})" for name in sorted(names & self._loaded)]
        statement: Any = self.generic_visit(node)
        return [*parse_at("\n".join(loads), node), statement]

    def visit_AugAssign(self, node: ast.AugAssign) -> list[ast.stmt]:
        """``x += 1`` reads ``x``, and may change it in place."""
        (check,) = parse_at(f"{PREFIX}.in_place(None)", node)
        assert isinstance(check, ast.Expr)
        assert isinstance(check.value, ast.Call)
        target = deepcopy(node.target)
        target.ctx = ast.Load()
        statement: Any = self.generic_visit(node)
        if any(isinstance(each, _EFFECTS) for each in ast.walk(target)):
            return [statement]
        check.value.args[0] = self.visit(target)
        return [check, statement]

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
        if isinstance(node.ctx, ast.Load) and node.id in self._loaded:
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
        name = "iterated_call" if hasattr(node, "is_iterated") else "call"
        return _operator(name, node, node.func, positional, keywords)

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


# --- pieces of syntax trees


def _is_ours(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == PREFIX


def _declared(nodes: Iterable[ast.AST], kind: type) -> set[str]:
    return {name for node in nodes if isinstance(node, kind) for name in node.names}


def _flags(node: ast.For | ast.While) -> list[str]:
    return getattr(node, "flags", [])


def _mark_iterated(node: ast.expr) -> None:
    """Mark calls whose iterators nothing but the loop over them can continue."""
    name = getattr(getattr(node, "func", None), "id", "")
    if isinstance(node, ast.Call) and name in ("enumerate", "zip", "reversed"):
        node.is_iterated = True  # type: ignore[attr-defined]
        for argument in node.args:
            _mark_iterated(argument)


def _without(flags: Sequence[str], test: ast.expr | None = None) -> ast.expr:
    """Whether none of some flags holds, and a condition does."""
    negated = [ast.UnaryOp(ast.Not(), ast.Name(flag, ast.Load())) for flag in flags]
    values = [*negated, *([] if test is None else [test])]
    return values[0] if len(values) == 1 else ast.BoolOp(ast.And(), values)


def _head(node: ast.stmt, part: ast.stmt | ast.expr) -> ast.stmt:
    """The first line of a statement, as the source location of its operator."""
    same_line = part.end_lineno == node.lineno
    end = part.end_col_offset if same_line else node.col_offset
    return ast.Pass(
        lineno=node.lineno,
        col_offset=node.col_offset,
        end_lineno=node.lineno,
        end_col_offset=end,
    )


def _assigns(nodes: Iterable[ast.AST]) -> bool:
    """Whether an expression assigns a variable, which it could not from a function."""
    return any(isinstance(node, ast.NamedExpr) for node in walk_scope(nodes))


def _identity(node: ast.Compare) -> ast.expr:
    """``a is b``, where whether it is may be known only when the program runs."""
    is_not = isinstance(node.ops[0], ast.IsNot)
    operands = [node.left, *node.comparators]
    if not (is_not or isinstance(node.ops[0], ast.Is)):
        return node
    if any(isinstance(side, ast.Constant) for side in operands):
        return node
    is_one = _operator("is_", node, *operands)
    return ast.copy_location(ast.UnaryOp(ast.Not(), is_one), node) if is_not else is_one


def _thunk(value: ast.expr) -> ast.expr:
    nothing = ast.arguments([], [], None, [], [], None, [])
    return ast.copy_location(ast.Lambda(nothing, value), value)


def _operator(name: str, node: ast.AST, *arguments: ast.expr) -> ast.expr:
    target = ast.Attribute(ast.Name(PREFIX, ast.Load()), name, ast.Load())
    return ast.copy_location(ast.Call(target, list(arguments), []), node)
