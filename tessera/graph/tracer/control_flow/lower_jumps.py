# SPDX-License-Identifier: Apache-2.0
"""Lower ``return``, ``break`` and ``continue`` to flags, and what follows to ``if``.

    for x in xs:                     broken = False
        if x > 3:                    for item in xs:  # while not broken
            break                        if broken: pass
        y = y + x                        else:
                                             x = item
                                             if x > 3:
                                                 broken = True
                                             else:
                                                 y = y + x

After that a function returns at its end only, and an iteration ends with its body.
"""

import ast
from collections.abc import Iterable, Sequence

from tessera.graph.tracer.control_flow.function_source import Unconvertible

PREFIX = "tessera__"
RETURNED, RESULT = f"{PREFIX}returned", f"{PREFIX}result"
_DISPLAY_NAMES = {RESULT: "the value returned", f"{PREFIX}value": "its value"}
_CHECKED_RESULT = f"{PREFIX}.returned({RESULT}, {RETURNED})"
OWN_SCOPE = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)

_Loop = ast.For | ast.While


def lower_jumps(definition: ast.FunctionDef) -> None:
    """Rewrite a function to return, and iterations to end, at the end of the body only.

    A loop gets an attribute ``flags``: variables of which each ends it if it holds.

    Raises:
      Unconvertible: A jump leaves a ``finally`` block, where it drops exceptions.
    """
    body = definition.body
    ends = body[-1:] if isinstance(body[-1], ast.Return) else []
    before = body[: len(body) - len(ends)]
    if not any(isinstance(each, ast.Return) for each in walk_scope(before)):
        definition.body = _Lowering().block(before) + ends
        return
    start = parse_at(f"{RETURNED} = False\n{RESULT} = {PREFIX}.NotReturned()", body[0])
    result = RESULT if _always_returns(body) else _CHECKED_RESULT
    end = parse_at(f"return {result}", body[-1])
    definition.body = [*start, *_Lowering().block(body), *end]


def display_name(variable: str) -> str:
    """What messages call a variable."""
    other = "whether a jump is taken" if variable.startswith(PREFIX) else variable
    return _DISPLAY_NAMES.get(variable, other)


def parse_at(text: str, node: ast.AST) -> list[ast.stmt]:
    """Parse generated statements, with the source location of the user's statement."""
    made = ast.parse(text).body
    for statement in made:
        for each in ast.walk(statement):
            for name in ("lineno", "col_offset", "end_lineno", "end_col_offset"):
                if hasattr(each, name):
                    delattr(each, name)
        ast.copy_location(statement, node)
    return made


def walk_scope(nodes: Iterable[ast.AST]) -> Iterable[ast.AST]:
    """Walk nodes and their children, except the bodies of functions and classes."""
    for node in nodes:
        yield node
        if not isinstance(node, OWN_SCOPE):
            yield from walk_scope(ast.iter_child_nodes(node))


class _Lowering:
    """Lowers the statements of one function."""

    def __init__(self) -> None:
        self._loops: list[str] = []
        self._count = 0

    def block(self, statements: Sequence[ast.stmt]) -> list[ast.stmt]:
        """Statements, where those after a jump depend on whether it was taken."""
        found: list[ast.stmt] = []
        for index, statement in enumerate(statements):
            rest = list(statements[index + 1 :])
            if isinstance(statement, ast.If) and rest:
                if _always_jumps(statement.body):
                    statement.orelse, rest = [*statement.orelse, *rest], rest[:0]
                elif _always_jumps(statement.orelse):
                    statement.body, rest = [*statement.body, *rest], rest[:0]
            lowered = self._statement(statement)
            found += lowered
            flags = _assigned(lowered) & self._flags()
            if flags or not rest:
                guarded = self.block(rest)
                for flag in sorted(flags) if guarded else ():
                    guarded = [_unless(flag, guarded)]
                return found + guarded
        return found

    def _flags(self) -> set[str]:
        """The flags that say that a jump left the code being lowered."""
        kinds = ("broken", "continued")
        own = {f"{PREFIX}{kind}_{loop}" for loop in self._loops[-1:] for kind in kinds}
        return {RETURNED, *own}

    def _statement(self, node: ast.stmt) -> list[ast.stmt]:
        match node:
            case ast.Return():
                result = _assign(RESULT, node.value or ast.Constant(None), node)
                return [result, _set_flag(RETURNED, node)]
            case ast.Break():
                return [_set_flag(f"{PREFIX}broken_{self._loops[-1]}", node)]
            case ast.Continue():
                return [_set_flag(f"{PREFIX}continued_{self._loops[-1]}", node)]
            case ast.For() | ast.While():
                return self._loop(node)
        if not isinstance(node, OWN_SCOPE):
            for part in (
                node,
                *getattr(node, "handlers", ()),
                *getattr(node, "cases", ()),
            ):
                self._parts(part)
        return [node]

    def _parts(self, node: ast.AST) -> None:
        """Lower the blocks of a statement, of a handler or of a case."""
        for name in ("body", "orelse", "finalbody"):
            statements = getattr(node, name, None)
            if isinstance(statements, list) and statements:
                lowered = self.block(statements)
                if name == "finalbody" and _assigned(lowered) & self._flags():
                    raise Unconvertible("a jump leaves its finally block")
                setattr(node, name, lowered)

    def _loop(self, node: _Loop) -> list[ast.stmt]:
        self._count += 1
        loop = str(self._count)
        self._loops.append(loop)
        body = self.block(node.body)
        self._loops.pop()
        broken, continued = f"{PREFIX}broken_{loop}", f"{PREFIX}continued_{loop}"
        used = _assigned(body)
        if continued in used:
            body = [_assign(continued, ast.Constant(False), node), *body]
        orelse, node.body = self.block(node.orelse), body
        del node.orelse[:]
        flags = [flag for flag in (broken, RETURNED) if flag in used]
        node.flags = flags  # type: ignore[union-attr]
        if flags and isinstance(node, ast.For):
            item = f"{PREFIX}item_{loop}"
            target = ast.Assign([node.target], ast.Name(item, ast.Load()))
            node.body = [ast.copy_location(target, node.target), *node.body]
            node.target = ast.copy_location(ast.Name(item, ast.Store()), node.target)
            for flag in flags:
                node.body = [_unless(flag, node.body)]
        for flag in flags if orelse else ():
            orelse = [_unless(flag, orelse)]
        start = [_assign(broken, ast.Constant(False), node)] if broken in used else []
        return [*start, node, *orelse]


def _always_jumps(statements: Sequence[ast.stmt]) -> bool:
    """Whether what follows a block is never reached from its end."""
    if not statements:
        return False
    last = statements[-1]
    if isinstance(last, ast.If):
        return _always_jumps(last.body) and _always_jumps(last.orelse)
    return isinstance(last, (ast.Return, ast.Break, ast.Continue))


def _always_returns(statements: Sequence[ast.stmt]) -> bool:
    """Whether a function does not reach its end but by a ``return`` or ``raise``."""
    last = statements[-1] if statements else None
    if isinstance(last, ast.If):
        return _always_returns(last.body) and _always_returns(last.orelse)
    return isinstance(last, ast.Return | ast.Raise)


def _assigned(statements: Sequence[ast.stmt]) -> set[str]:
    """The generated flags that some statements set to True."""
    return {
        target.id
        for node in walk_scope(statements)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id.startswith(PREFIX)
        if isinstance(node.value, ast.Constant) and node.value.value is True
    }


def _set_flag(flag: str, node: ast.stmt) -> ast.stmt:
    return _assign(flag, ast.Constant(True), node)


def _assign(name: str, value: ast.expr, node: ast.stmt) -> ast.stmt:
    return ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], value), node)


def _unless(flag: str, body: list[ast.stmt]) -> ast.stmt:
    (made,) = parse_at(f"if {flag}: pass", body[0])
    assert isinstance(made, ast.If)
    made.orelse = body
    return made
