# SPDX-License-Identifier: Apache-2.0
"""Find the definition of a function in its source file."""

import ast
import functools
import linecache
from copy import deepcopy
from types import CodeType, FunctionType
from typing import TypeGuard


class Unconvertible(Exception):
    """Why a function cannot be converted, in words."""


class AssignsOutside(Unconvertible):
    """The variable of a module or of another function that a function assigns."""


def definition_of(
    function: FunctionType,
) -> tuple[ast.FunctionDef | ast.Lambda, str]:
    """A copy of the definition of a function, and the class that it stands in, or "".

    Raises:
      Unconvertible: Its source is in no file, or is not clearly one definition.
    """
    code = function.__code__
    lines = linecache.getlines(code.co_filename, function.__globals__)
    if not lines:
        raise Unconvertible(f"its source is not to be had, from {code.co_filename}")
    try:
        tree = _parsed("".join(lines))
    except SyntaxError as error:
        raise Unconvertible(f"its source does not parse: {error.msg}") from error
    found = [each for each in _definitions(tree, "") if _is_of(each[0], code)]
    if not found:
        raise Unconvertible(
            f"line {code.co_firstlineno} of {code.co_filename} has no such definition"
        )
    node, owner = found[-1]  # the innermost of lambdas
    assert isinstance(node, (ast.FunctionDef, ast.Lambda))
    return deepcopy(node), owner


@functools.lru_cache(maxsize=8)
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


def _definitions(node: ast.AST, owner: str) -> list[tuple[ast.AST, str]]:
    """Every definition below a node, and the class whose private names it sees."""
    found: list[tuple[ast.AST, str]] = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.Lambda)):
            found.append((child, owner))
        inner = child.name if isinstance(child, ast.ClassDef) else owner
        found += _definitions(child, inner)
    return found


def _is_of(node: ast.AST, code: CodeType) -> TypeGuard[ast.FunctionDef | ast.Lambda]:
    """Whether a node is the definition that some code was compiled from."""
    if isinstance(node, ast.FunctionDef):
        first = node.decorator_list[0] if node.decorator_list else node
        return node.name == code.co_name and first.lineno == code.co_firstlineno
    if not isinstance(node, ast.Lambda) or code.co_name != "<lambda>":
        return False
    return node.lineno == code.co_firstlineno and _spans(node, code)


def _spans(node: ast.Lambda, code: CodeType) -> bool:
    """Whether all of some code lies in the body of a lambda."""
    body = node.body
    start, end = (body.lineno, body.col_offset), (body.end_lineno, body.end_col_offset)
    return all(
        start <= (line, column) <= end
        for line, _, column, _ in code.co_positions()
        if line is not None and column is not None and (line, column) > (start[0], 0)
    )
