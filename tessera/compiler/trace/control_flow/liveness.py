# SPDX-License-Identifier: Apache-2.0
"""Liveness analysis: which variables of a block may be read after it.

A wrong answer computes nothing wrong: a variable that counts as dead gets a value whose
use is an error. Variables that nested functions read count as live everywhere.
"""

import ast
import collections
from collections.abc import Iterable, Sequence

from tessera.compiler.trace.control_flow.lower_jumps import OWN_SCOPE, walk_scope

_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_COMPOUND = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.TryStar, ast.Match)


def assigned_names(nodes: Iterable[ast.AST]) -> set[str]:
    """The variables that some statements assign, in any of Python's ways."""
    nodes = [*walk_scope(nodes)]
    found: set[str] = set()
    targets = {
        id(name)
        for node in nodes
        if isinstance(node, _COMPREHENSIONS)
        for generator in node.generators
        for name in ast.walk(generator.target)
    }
    for node in nodes:
        match node:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
                if id(node) not in targets:
                    found.add(name)
            case (
                ast.FunctionDef(name=str(name))
                | ast.ClassDef(name=str(name))
                | ast.ExceptHandler(name=str(name))
                | ast.MatchAs(name=str(name))
                | ast.MatchStar(name=str(name))
                | ast.MatchMapping(rest=str(name))
            ):
                found.add(name)
            case ast.alias(name=name, asname=other):
                found.add(other or name.partition(".")[0])
    return found


class Liveness:
    """The liveness of variables in one function.

    Args:
      definition: The function.
      shared: Variables that it assigns and that are not its own.
    """

    def __init__(self, definition: ast.FunctionDef, shared: set[str]) -> None:
        self._reads = _reads(definition.body)
        inner = [n for n in walk_scope(definition.body) if isinstance(n, OWN_SCOPE)]
        self._captured = _reads(inner).keys() | shared

    def dead(self, *blocks: Sequence[ast.AST]) -> tuple[str, ...]:
        """The variables that some blocks assign, and that no code reads after them.

        Other code does not read them, and neither does their own block, in the next
        iteration of a loop, before it assigns them.
        """
        inside = _reads(node for block in blocks for node in block)
        names, exposed = set[str](), set[str]()
        for block in blocks:
            assigned = set[str]()
            for node in block:
                exposed |= _reads([node]).keys() - assigned
                names |= assigned_names([node])
                if not isinstance(node, _COMPOUND):
                    assigned |= assigned_names([node])
        live = {name for name, count in self._reads.items() if count > inside[name]}
        return tuple(sorted(names - live - self._captured - exposed))


def _reads(nodes: Iterable[ast.AST]) -> collections.Counter[str]:
    """How often some code reads each variable, functions inside of it included."""
    found: collections.Counter[str] = collections.Counter()
    for node in (inner for each in nodes for inner in ast.walk(each)):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store):
            found[node.id] += 1
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] += 1
        found.update(getattr(node, "flags", ()))  # of a loop: what ends it
    return found
