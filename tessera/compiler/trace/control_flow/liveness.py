# SPDX-License-Identifier: Apache-2.0
"""Liveness analysis: which variables of a block may be read after it.

A wrong answer computes nothing wrong: a variable that counts as dead gets a value whose
use is an error. Variables that nested functions read count as live everywhere.
"""

import ast
from collections.abc import Iterable, Sequence

from tessera.compiler.trace.control_flow.lower_jumps import OWN_SCOPE, walk_scope

_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def assigned_names(nodes: Iterable[ast.AST]) -> set[str]:
    """The variables that some statements assign, in any of Python's ways."""
    found: set[str] = set()
    targets = {
        id(name)
        for node in walk_scope(nodes)
        if isinstance(node, _COMPREHENSIONS)
        for generator in node.generators
        for name in ast.walk(generator.target)
    }
    for node in walk_scope(nodes):
        match node:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
                if id(node) not in targets:
                    found.add(name)
            case ast.FunctionDef(name=str(name)) | ast.ClassDef(name=str(name)):
                found.add(name)
            case (
                ast.ExceptHandler(name=str(name))
                | ast.MatchAs(name=str(name))
                | ast.MatchStar(name=str(name))
                | ast.MatchMapping(rest=str(name))
            ):
                found.add(name)
            case ast.alias(name=name, asname=other):
                found.add(other or name.partition(".")[0])
    return found


def read(nodes: Iterable[ast.AST]) -> set[str]:
    """The variables that some code reads, functions inside of it included."""
    return {
        node.id
        for each in nodes
        for node in ast.walk(each)
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store)
    }


def upward_exposed(statements: Sequence[ast.AST]) -> tuple[set[str], set[str]]:
    """Variables that are read before they are assigned; those that always are."""
    reads, assigned = set[str](), set[str]()
    for node in statements:
        own, made = _upward_exposed(node)
        reads |= own - assigned
        assigned |= made
    return reads, assigned


def _upward_exposed(node: ast.AST) -> tuple[set[str], set[str]]:
    match node:
        case ast.If():
            ways = upward_exposed(node.body), upward_exposed(node.orelse)
            return (
                read([node.test]) | ways[0][0] | ways[1][0],
                ways[0][1] & ways[1][1],
            )
        case ast.For() | ast.While():
            head = [node.iter] if isinstance(node, ast.For) else [node.test]
            target = (
                assigned_names([node.target]) if isinstance(node, ast.For) else set()
            )
            return read(head) | (upward_exposed(node.body)[0] - target), set()
        case ast.With():
            inner, made = upward_exposed(node.body)
            items = assigned_names(node.items)
            return read(node.items) | (inner - items), made | items
        case ast.Try() | ast.Match():
            return read([node]), set()
        case ast.AugAssign(target=ast.Name(id=name)):
            return read([node.value]) | {name}, {name}
    return read([node]), assigned_names([node])


class Liveness:
    """The liveness of variables in one function."""

    def __init__(self, definition: ast.FunctionDef) -> None:
        self._order: dict[int, int] = {}
        self._reads: dict[str, int] = {}
        self._count = 0
        self._ends: dict[int, int] = {}
        self._captured = set[str]()
        self._needed: dict[int, set[str]] = {}
        self._turns: dict[int, set[str]] = {}
        for statement in definition.body:
            self._visit(statement, set())

    def _visit(self, node: ast.AST, needed: set[str]) -> None:
        """Number the nodes below; later iterations of outer loops read ``needed``."""
        self._count += 1
        turn = set[str]()
        if isinstance(node, OWN_SCOPE):
            self._captured |= read([node])
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store):
            self._reads[node.id] = self._count
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            self._reads[node.target.id] = self._count
        if isinstance(node, (ast.For, ast.While)):
            head = [node.test] if isinstance(node, ast.While) else []
            flags = set(getattr(node, "flags", ()))
            turn = flags | upward_exposed([*head, *node.body])[0]
        self._needed[id(node)], self._turns[id(node)] = needed, turn
        for child in ast.iter_child_nodes(node):
            self._visit(child, needed | turn)
        self._ends[id(node)] = self._count

    def after(self, node: ast.AST) -> set[str]:
        """Variables that may be read after a statement, or in its next iteration."""
        end = self._ends[id(node)]
        later = {name for name, place in self._reads.items() if place > end}
        return later | self._captured | self._needed[id(node)]

    def carried(self, node: ast.AST) -> set[str]:
        """Variables that the next iteration of a loop, or what follows it, may read."""
        return self.after(node) | self._turns[id(node)]
