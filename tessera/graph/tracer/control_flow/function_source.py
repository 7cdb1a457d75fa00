# SPDX-License-Identifier: Apache-2.0
"""Find the definition of a function in its source file."""

import ast
import functools
import inspect
import linecache
from copy import deepcopy
from types import CodeType, FunctionType
from typing import TypeGuard


class Unconvertible(Exception):
    """Why a function cannot be converted, in words."""


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
    except SyntaxError:
        tree = _parsed_block(lines, code.co_firstlineno)
    found = [each for each in _definitions(tree, "") if _is_of(each[0], code)]
    if len(found) > 1:  # lambdas of one line
        found = [each for each in found if _spans(each[0], code)] or found
    if len(found) != 1:
        raise Unconvertible(
            f"line {code.co_firstlineno} of {code.co_filename} has {len(found)} "
            f"definitions like it"
        )
    node, owner = found[0]
    assert isinstance(node, (ast.FunctionDef, ast.Lambda))
    return deepcopy(node), owner


@functools.lru_cache(maxsize=8)
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


def _parsed_block(lines: list[str], first: int) -> ast.Module:
    """Parse the block that begins at a line of a file that is not all Python.

    A page of documentation is such a file.
    """
    block = "".join(inspect.getblock(lines[first - 1 :]))
    indented = block[:1].isspace()
    try:
        tree = ast.parse("if True:\n" * indented + block)
    except SyntaxError as error:
        raise Unconvertible(f"its source does not parse: {error.msg}") from error
    return ast.increment_lineno(tree, first - 1 - indented)


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
        if node.name != code.co_name or first.lineno != code.co_firstlineno:
            return False
    elif isinstance(node, ast.Lambda):
        if code.co_name != "<lambda>" or node.lineno != code.co_firstlineno:
            return False
    else:
        return False
    names = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    count = code.co_argcount + code.co_kwonlyargcount
    own = [name.rpartition("__")[2] for name in code.co_varnames[:count]]
    return [name.arg.rpartition("__")[2] for name in names] == own


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
