# SPDX-License-Identifier: Apache-2.0
"""The variables that some statements assign."""

import ast
from collections.abc import Iterable

from tessera.graph.tracer.control_flow.lower_jumps import walk_scope

_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def assigned_names(nodes: Iterable[ast.AST]) -> set[str]:
    """Their names, in whichever of Python's ways they are assigned."""
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
