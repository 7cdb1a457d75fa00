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
from collections.abc import Iterable
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
_EFFECTS = (ast.Call, ast.NamedExpr)  # what may change something when it is evaluated


class InsertOperators(ast.NodeTransformer):
    """Inserts the operators into one function whose jumps are lowered.

    Args:
      definition: The function.

    Raises:
      Unconvertible: It asks for its own local variables.
    """

    def __init__(self, definition: ast.FunctionDef) -> None:
        self._definition = definition
        self._count = 0
        body = walk_scope(definition.body)
        self._variables = assigned_names(n for n in body if isinstance(n, ast.If))
        arguments = definition.args
        first = [*arguments.posonlyargs, *arguments.args][:1]
        self._first = first[0].arg if first else ""

    def insert(self) -> None:
        """Insert the operators."""
        start, keywords = self._definition.body[0], self._definition.args.kwarg
        body = self._block(self._definition.body)
        if keywords is not None:
            body = [*parse_at(f"{PREFIX}.made({keywords.arg})", start), *body]
        if self._variables:  # they are the function's own, wherever they are assigned
            names = " = ".join(sorted(self._variables))
            body = [*parse_at(f"if False: {names} = None", start), *body]
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
        parts = [ast.Name(part.name, ast.Load()) for part in (body, orelse)]
        call = _operator("if_stmt", node, self.visit(node.test), *parts)
        return [body, orelse, _at(ast.Expr(call), node)]

    def visit_While(self, node: ast.While) -> ast.stmt:
        """A ``while``, which Python runs."""
        negated = [ast.UnaryOp(ast.Not(), flag) for flag in _flags(node)]
        holds = ast.BoolOp(ast.And(), [*negated, node.test]) if negated else node.test
        node.test = _operator("turns", node.test, self.visit(holds))
        node.body = self._block(node.body)
        return node

    def visit_For(self, node: ast.For) -> ast.stmt:
        """A ``for``, which Python runs until it knows that a jump ends it."""
        flags = _flags(node)
        node.target, node.iter = self.visit(node.target), self.visit(node.iter)
        if flags:
            left = _thunk(_at(ast.Tuple(flags, ast.Load()), node))
            node.iter = _operator("items", node, node.iter, left)
        node.body = self._block(node.body)
        return node

    def _function(
        self, part: str, node: ast.If, body: list[ast.stmt]
    ) -> ast.FunctionDef:
        """A function for one branch; what it assigns is not its own."""
        self._count += 1
        names = ", ".join(sorted(assigned_names(body)))
        text = f"def {PREFIX}{part}_{self._count}(): pass"
        (made,) = parse_at(text, node)
        assert isinstance(made, ast.FunctionDef)
        if body:
            declaration = parse_at(f"nonlocal {names}", node) if names else []
            made.body = [*declaration, *self._block(body)]
        return made

    def visit_AugAssign(self, node: ast.AugAssign) -> list[ast.stmt]:
        """``x += 1`` reads ``x``, and may change it in place."""
        target = deepcopy(node.target)
        target.ctx = ast.Load()
        has_effects = any(isinstance(each, _EFFECTS) for each in ast.walk(target))
        name, checked = ast.Constant(ast.unparse(target)), self.visit(target)
        check = ast.Expr(_operator("in_place", node, checked, name))
        statement: Any = self.generic_visit(node)
        return [statement] if has_effects else [_at(check, node), statement]

    def visit_match_case(self, node: ast.match_case) -> ast.AST:
        """Patterns are not expressions, and stay as they are."""
        node.guard = node.guard and self.visit(node.guard)
        node.body = self._block(node.body)
        return node

    def _definition_inside(self, node: ast.AST) -> ast.AST:
        """A function inside is left as it is: it is converted when it is called."""
        return node

    visit_Lambda = visit_FunctionDef = visit_ClassDef = _definition_inside

    # --- expressions

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """A variable of a block may have no value, or none that can be used."""
        if node.id in (PREFIX, "__class__") or not isinstance(node.ctx, ast.Load):
            return node
        return _operator("load", node, node, ast.Constant(node.id))

    def _part(self, node: ast.Attribute | ast.Subscript) -> ast.AST:
        """An attribute or an entry; assignments into it are checked."""
        is_read = isinstance(node.ctx, ast.Load)
        name = ast.Constant(ast.unparse(node if is_read else node.value))
        self.generic_visit(node)
        if not is_read:
            node.value = _operator("written", node.value, node.value, name)
            return node
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
            return _operator("made", node, node)
        return _operator("load", node, node, name)

    visit_Attribute = visit_Subscript = _part

    def _new(self, node: ast.expr) -> ast.AST:
        """An expression whose value is new, so the code may change it."""
        self.generic_visit(node)
        is_store = isinstance(getattr(node, "ctx", None), ast.Store)
        return node if is_store else _operator("made", node, node)

    visit_List = visit_Dict = visit_Set = visit_BinOp = _new
    visit_ListComp = visit_DictComp = visit_SetComp = visit_GeneratorExp = _new

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
        """``a is b``; the parts of ``a < b < c`` are decided by Python."""
        if len(node.ops) > 1 and any(
            isinstance(o, ast.Is | ast.IsNot) for o in node.ops
        ):
            raise Unconvertible("it has `is` in a comparison of several parts")
        self.generic_visit(node)
        return _identity(node) if len(node.ops) == 1 else node

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
        attribute = getattr(node.func, "attr", "")
        self.generic_visit(node)
        operator = "call"
        if name == "print":
            operator, node.args = "print_call", [_printed_text(a) for a in node.args]
        if name in ("breakpoint", "globals") or attribute == "set_trace":
            return node
        call: Any = _operator(operator, node, node.func, *node.args)
        call.keywords = node.keywords
        return call


# --- pieces of syntax trees


def _is_ours(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == PREFIX


def _flags(node: ast.For | ast.While) -> list[ast.expr]:
    """Variables that tell whether a jump ends a loop."""
    names: list[str] = getattr(node, "flags", [])
    return [_at(ast.Name(name, ast.Load()), node) for name in names]


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


def _at(made: Any, node: ast.AST) -> Any:
    """A node with the source location of another one."""
    return ast.copy_location(made, node)


def _printed_text(node: ast.expr) -> ast.expr:
    """An argument of ``print``: an f-string may have values of the program in it."""
    if not isinstance(node, ast.JoinedStr):
        return node
    parts: list[ast.expr] = []
    for part in node.values:
        if isinstance(part, ast.FormattedValue):
            conversion = chr(part.conversion) if part.conversion > 0 else ""
            spec = part.format_spec or ast.Constant("")
            values = [part.value, ast.Constant(conversion), spec]
            part = ast.Tuple(values, ast.Load())
        parts.append(part)
    return _operator("printed_text", node, *parts)


def _thunk(value: ast.expr) -> ast.expr:
    nothing = ast.arguments([], [], None, [], [], None, [])
    return ast.copy_location(ast.Lambda(nothing, value), value)


def _operator(name: str, node: ast.AST, *arguments: ast.expr) -> ast.expr:
    target = _at(ast.Attribute(ast.Name(PREFIX, ast.Load()), name, ast.Load()), node)
    # Python takes the last line of the attribute for the line of the call.
    if hasattr(node, "lineno"):
        target.end_lineno, target.end_col_offset = target.lineno, target.col_offset
    return _at(ast.Call(target, list(arguments), []), node)
