# SPDX-License-Identifier: Apache-2.0
"""Solves for the sizes of symbols, given the sizes of expressions of them.

Each dim of an annotated array is a constraint: an expression equals a size. Symbols by
themselves come first. An expression with one unknown symbol left is solved for it if it
is linear in it. Products of several unknowns, such as ``3*D_head*H`` and ``D_head*H``,
are compared with each other.
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
    products = _solve_expressions(expressions, solution)
    _assign(_unknown_products(products, solution), solution)
    return solution


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


def _solve_expressions(
    constraints: list[Constraint], solution: Solution
) -> list[Constraint]:
    """Check and solve until nothing changes; returns those that still have unknowns."""
    while True:
        unsolved: list[Constraint] = []
        for constraint in constraints:
            unknown = solution.unknown(constraint.dim.symbols)
            if not unknown:
                _check(constraint, solution)
            elif len(unknown) > 1 or not _solve_for(unknown[0], constraint, solution):
                unsolved.append(constraint)
        if len(unsolved) == len(constraints):
            return unsolved
        constraints = unsolved


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


def _solve_for(symbol: str, constraint: Constraint, solution: Solution) -> bool:
    """Solve an expression for a symbol that it is linear in; False if it is not."""
    dim = constraint.dim
    if "//" in dim.text:
        return False
    # Degrees above one show in a second difference: 0, 1, 2 and 3 suffice for a cubic.
    at = [dim.evaluate({**solution.sizes, symbol: size}) for size in range(4)]
    slope = at[1] - at[0]
    if slope == 0 or at != [at[0] + slope * size for size in range(4)]:
        return False
    size, remainder = divmod(constraint.size - at[0], slope)
    if remainder or size < 0:
        solution.problems.append(
            f"{dim} is {constraint.size} by {constraint.source}, which no {symbol} "
            "gives"
        )
    else:
        solution.sizes[symbol] = size
    return True


def _unknown_products(
    constraints: Iterable[Constraint], solution: Solution
) -> list[NamedSize]:
    """The sizes of products of unknowns: what is left divided by the known factors."""
    products: list[NamedSize] = []
    for constraint in constraints:
        dim = constraint.dim
        if dim.product is None:
            continue  # a sum of unknowns is not determined
        coefficient, symbols = dim.product
        unknown = solution.unknown(symbols)
        known = (solution.sizes[s] for s in symbols if s in solution.sizes)
        factor = coefficient * math.prod(known)
        if factor == 0 or constraint.size % factor:
            solution.problems.append(
                f"{dim} is {constraint.size} by {constraint.source}, "
                f"which is no multiple of {factor}"
            )
            continue
        product = "*".join(sorted(unknown))
        products.append((product, constraint.size // factor, constraint.source))
    return products
