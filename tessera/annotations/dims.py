# SPDX-License-Identifier: Apache-2.0
"""Parses one dim of an annotation, and evaluates its size."""

import ast
import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from tessera.errors import AnnotationError
from tessera.foundations.dtypes import DTYPES

_OPERATIONS: Final[Mapping[type[ast.operator], Callable[[int, int], int]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


@dataclass(frozen=True)
class Dim:
    """One dim of an annotation: a symbol, an expression of symbols, a size, or ``...``.

    Attributes:
      text: The source text, without spaces: ``B``, ``3*D_head*H``, ``S+1``, ``8``,
        ``*batch``, ``...``, ``_``.

    Example:
      >>> dim = Dim("3*D_head*H")
      >>> dim.symbols, dim.product, dim.size
      (('D_head', 'H'), (3, ('D_head', 'H')), None)
    """

    text: str

    @property
    def is_variadic(self) -> bool:
        """Whether it stands for any number of dims: ``...`` or ``*batch``."""
        return self.text.startswith(("*", "..."))

    @property
    def is_anonymous(self) -> bool:
        """Whether it constrains no size: ``...``, ``_``, ``_name``, ``*_name``."""
        return self.text == "..." or self.text.lstrip("*").startswith("_")

    @functools.cached_property
    def symbols(self) -> tuple[str, ...]:
        """The symbols of its size, each once, in order; ``*batch`` has none."""
        if self.is_variadic or self.is_anonymous:
            return ()
        names = [n for n in ast.walk(self._parsed) if isinstance(n, ast.Name)]
        names.sort(key=lambda name: name.col_offset)
        return tuple(dict.fromkeys(name.id for name in names))

    @functools.cached_property
    def product(self) -> tuple[int, tuple[str, ...]] | None:
        """Of a product such as ``3*D_head*H``, its coefficient and its symbols."""
        return _as_product(self._parsed) if self.symbols else None

    @property
    def coefficient(self) -> int:
        """The integer factor of a product; 1 if there is none."""
        return self.product[0] if self.product else 1

    @functools.cached_property
    def size(self) -> int | None:
        """The size, if it is a number."""
        if self.is_variadic or self.is_anonymous or self.symbols:
            return None
        return self.evaluate({})

    def evaluate(self, sizes: Mapping[str, int]) -> int:
        """The size, given the sizes of its symbols; -1 for a division by zero."""
        try:
            return _evaluate(self._parsed, sizes)
        except ZeroDivisionError:
            return -1

    @functools.cached_property
    def _parsed(self) -> ast.expr:
        return ast.parse(self.text, mode="eval").body

    def __str__(self) -> str:
        return self.text


def _evaluate(node: ast.expr, sizes: Mapping[str, int]) -> int:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id=name):
            return sizes[name]
        case ast.BinOp(left=left, op=op, right=right):
            return _OPERATIONS[type(op)](
                _evaluate(left, sizes), _evaluate(right, sizes)
            )
    raise AssertionError("dim_of checks expressions")


def _as_product(node: ast.expr) -> tuple[int, tuple[str, ...]] | None:
    match node:
        case ast.Constant(value=int(number)):
            return number, ()
        case ast.Name(id=name):
            return 1, (name,)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            parts = _as_product(left), _as_product(right)
            if parts[0] is not None and parts[1] is not None:
                return parts[0][0] * parts[1][0], (*parts[0][1], *parts[1][1])
    return None


def texts_of(part: str) -> list[str]:
    """Split a string into dims, as jaxtyping does, unless it is one expression."""
    words = part.split()
    if any(word[0] in "+-/" or word == "*" or word[-1] in "+-*/" for word in words):
        return ["".join(words)]
    return words


def dim_of(text: str) -> Dim:
    """Parse a dim.

    Raises:
      AnnotationError: [T315] it is neither a symbol nor an expression of symbols.
    """
    dim = Dim(text)
    name = text.lstrip("*")
    if text in DTYPES:
        raise malformed(repr(text), f"it names a dtype: write ts.{text}")
    if text == "..." or (name.isidentifier() and len(text) - len(name) <= 1):
        return dim
    try:
        expression = ast.parse(text, mode="eval").body
    except SyntaxError:
        raise malformed(repr(text), "it is not an expression") from None
    if not _is_legal(expression):
        raise malformed(repr(text), "only symbols, integers, + - * // are allowed")
    return dim


def _is_legal(node: ast.expr) -> bool:
    match node:
        case ast.Constant(value=value):
            return type(value) is int
        case ast.BinOp(left=left, op=op, right=right):
            return type(op) in _OPERATIONS and _is_legal(left) and _is_legal(right)
    return isinstance(node, ast.Name)


def malformed(part: str, problem: str) -> AnnotationError:
    """The error for brackets with something that is neither a dim nor a dtype."""
    return AnnotationError(
        f"{part} cannot stand in an annotation ts.Tensor[…]",
        got=problem,
        fix='write dims, then a dtype: ts.Tensor["B", "2*D", 8, ts.f32]; a dim is a '
        'symbol, an expression of symbols, a size, "_", "*name" or ...',
    )
