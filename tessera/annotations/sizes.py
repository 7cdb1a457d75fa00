# SPDX-License-Identifier: Apache-2.0
"""Solves for the sizes of symbols, given the sizes of expressions of them.

Each dim of an annotated array is a constraint: an expression equals a size. Symbols by
themselves come first, then those that are the only unknown of a product. What has no
unknown left is checked. Products of several unknowns, such as ``3*D_head*H`` and
``D_head*H``, are compared with each other, and other expressions with the same ones.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from tessera.annotations.dims import Dim

# A name, the size that a constraint gives it, and the source of the constraint.
NamedSize: TypeAlias = tuple[str, int, str]


@dataclass(frozen=True)
class Constraint:
    """The size of one dim of one array, whose ``source`` is such as ``w (dim 1)``."""

    dim: Dim
    size: int
    source: str


@dataclass
class Solution:
    """The sizes of symbols, and the conflicts between constraints.

    Attributes:
      sizes: The size of each symbol that has one.
      problems: A sentence for each conflict.
    """

    sizes: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def unknown(self, symbols: Iterable[str]) -> list[str]:
        """The symbols without a size."""
        return [symbol for symbol in symbols if symbol not in self.sizes]


def solve(constraints: Iterable[Constraint]) -> Solution:
    """The sizes of symbols that satisfy the constraints, and what does not.

    Example:
      >>> solution = solve([
      ...     Constraint(Dim("D"), 8, "x (dim 1)"),
      ...     Constraint(Dim("D"), 6, "w (dim 0)"),
      ...     Constraint(Dim("3*H"), 12, "w (dim 1)"),
      ... ])
      >>> solution.sizes["H"], solution.problems
      (4, ['D is 8 by x (dim 1), 6 by w (dim 0)'])
    """
    solution = Solution()
    named: list[NamedSize] = []
    expressions: list[Constraint] = []
    for constraint in constraints:
        dim = constraint.dim
        if dim.symbols == (dim.text,):
            named.append((dim.text, constraint.size, constraint.source))
        elif not dim.is_anonymous:
            expressions.append(constraint)
    _assign(named, solution)
    while determined := [c for c in expressions if _lacks_one(c, solution)]:
        expressions = [c for c in expressions if c not in determined]
        _assign(_unknown_parts(determined, solution), solution)
    unknown = [c for c in expressions if solution.unknown(c.dim.symbols)]
    for constraint in expressions:
        if constraint not in unknown:
            _check(constraint, solution)
    _assign(_unknown_parts(unknown, solution), solution)
    return solution


def _lacks_one(constraint: Constraint, solution: Solution) -> bool:
    """Whether it is a product of which one factor has no size."""
    product = constraint.dim.product
    return product is not None and len(solution.unknown(product[1])) == 1


def _assign(named: Iterable[NamedSize], solution: Solution) -> None:
    """Give each name the first of its sizes; report names with several."""
    sources: dict[str, dict[int, list[str]]] = {}
    for name, size, source in named:
        sources.setdefault(name, {}).setdefault(size, []).append(source)
    for name, by_size in sources.items():
        solution.sizes[name] = next(iter(by_size))
        if len(by_size) > 1:
            sizes = [f"{size} by {' and '.join(at)}" for size, at in by_size.items()]
            solution.problems.append(f"{name} is {', '.join(sizes)}")


def _check(constraint: Constraint, solution: Solution) -> None:
    dim, source = constraint.dim, constraint.source
    size = dim.evaluate(solution.sizes)
    if size == constraint.size:
        return
    if not dim.symbols:
        solution.problems.append(f"{source} is {constraint.size}, not {size}")
        return
    sizes = ", ".join(f"{name} = {solution.sizes[name]}" for name in dim.symbols)
    solution.problems.append(
        f"{dim} is {'no size' if size < 0 else size} with {sizes}, "
        f"and {constraint.size} by {source}"
    )


def _unknown_parts(
    constraints: Iterable[Constraint], solution: Solution
) -> list[NamedSize]:
    """The sizes of products without their known factors, and of other expressions."""
    parts: list[NamedSize] = []
    for constraint in constraints:
        dim, size, source = constraint.dim, constraint.size, constraint.source
        if dim.product is None:
            parts.append((dim.text, size, source))
            continue
        coefficient, symbols = dim.product
        known = (solution.sizes[s] for s in symbols if s in solution.sizes)
        factor = coefficient * math.prod(known)
        if size % factor if factor else size:
            solution.problems.append(
                f"{dim} is {size} by {source}, which is no multiple of {factor}"
            )
        elif factor:
            unknown = "*".join(sorted(solution.unknown(symbols)))
            parts.append((unknown, size // factor, source))
    return parts
