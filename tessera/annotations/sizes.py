# SPDX-License-Identifier: Apache-2.0
"""Sizes for symbols: what the dims of some arrays say of them together.

Each dim says that an expression has a size. Symbols alone come first; an expression
with one unknown left is solved for it where that is linear; products of several
unknowns, such as ``3*D_head*H`` and ``D_head*H``, are compared with each other.
"""

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tessera.annotations.dims import Dim


@dataclass(frozen=True)
class Fact:
    """What one dim of one array is: ``w (dim 1)`` is of some size."""

    dim: Dim
    size: int
    place: str


@dataclass
class Sizes:
    """Sizes of symbols, and where they do not agree.

    Attributes:
      known: The size of each symbol that has one.
      problems: A sentence for each conflict.
    """

    known: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def solve(facts: Iterable[Fact]) -> Sizes:
    """The sizes that facts give to symbols.

    Example:
      >>> solved = solve([
      ...     Fact(Dim("D"), 8, "x (dim 1)"),
      ...     Fact(Dim("D"), 6, "w (dim 0)"),
      ...     Fact(Dim("3*H"), 12, "w (dim 1)"),
      ... ])
      >>> solved.known["H"], solved.problems
      (4, ['D is 8 by x (dim 1), 6 by w (dim 0)'])
    """
    sizes = Sizes()
    facts = [fact for fact in facts if not fact.dim.is_anonymous]
    plain = [fact for fact in facts if fact.dim.symbols == (fact.dim.text,)]
    _agree([(fact.dim.text, fact) for fact in plain], sizes)
    rest = _solve_expressions([f for f in facts if f not in plain], sizes)
    _compare_products(rest, sizes)
    return sizes


def _agree(
    claims: Iterable[tuple[str, Fact]],
    sizes: Sizes,
    values: Mapping[str, int] | None = None,
) -> None:
    """Give each name the first size that is claimed of it; report the others."""
    claimed: dict[str, dict[int, list[str]]] = {}
    for name, fact in claims:
        size = values[fact.place] if values else fact.size
        claimed.setdefault(name, {}).setdefault(size, []).append(fact.place)
    for name, by_size in claimed.items():
        if len(by_size) == 1:
            sizes.known[name] = next(iter(by_size))
            continue
        said = [f"{size} by {' and '.join(at)}" for size, at in by_size.items()]
        sizes.problems.append(f"{name} is {', '.join(said)}")
        sizes.known[name] = next(iter(by_size))


def _solve_expressions(facts: list[Fact], sizes: Sizes) -> list[Fact]:
    """Check and solve until nothing changes; what is left has unknowns."""
    while True:
        left: list[Fact] = []
        for fact in facts:
            unknown = [s for s in fact.dim.symbols if s not in sizes.known]
            if not unknown:
                _check(fact, sizes)
            elif len(unknown) > 1 or not _solve_for(unknown[0], fact, sizes):
                left.append(fact)
        if len(left) == len(facts):
            return left
        facts = left


def _check(fact: Fact, sizes: Sizes) -> None:
    size = fact.dim.evaluate(sizes.known)
    if size == fact.size:
        return
    if not fact.dim.symbols:
        sizes.problems.append(f"{fact.place} is {fact.size}, not {size}")
        return
    given = ", ".join(f"{name} = {sizes.known[name]}" for name in fact.dim.symbols)
    sizes.problems.append(
        f"{fact.dim} is {'no size' if size < 0 else size} with {given}, "
        f"and {fact.size} by {fact.place}"
    )


def _solve_for(symbol: str, fact: Fact, sizes: Sizes) -> bool:
    """Find one symbol of an expression that is linear in it; False where it is not."""
    if "//" in fact.dim.text:
        return False
    at = [fact.dim.evaluate({**sizes.known, symbol: size}) for size in (0, 1, 2, 3)]
    slopes = {after - before for before, after in itertools.pairwise(at)}
    if len(slopes) > 1 or slopes == {0}:
        return False
    (slope,) = slopes
    size, left_over = divmod(fact.size - at[0], slope)
    if left_over or size < 0:
        sizes.problems.append(
            f"{fact.dim} is {fact.size} by {fact.place}, which no {symbol} gives"
        )
    else:
        sizes.known[symbol] = size
    return True


def _compare_products(facts: Iterable[Fact], sizes: Sizes) -> None:
    """See that products of the same unknowns are of one size."""
    claims: list[tuple[str, Fact]] = []
    values: dict[str, int] = {}
    for fact in facts:
        if not fact.dim.is_product:
            continue  # it says nothing until more is known
        given = [sizes.known[s] for s in fact.dim.factors if s in sizes.known]
        factor = fact.dim.coefficient * math.prod(given)
        unknown = [s for s in fact.dim.factors if s not in sizes.known]
        if factor == 0 or fact.size % factor:
            sizes.problems.append(
                f"{fact.dim} is {fact.size} by {fact.place}, "
                f"which is no multiple of {factor}"
            )
            continue
        claims.append(("*".join(sorted(unknown)), fact))
        values[fact.place] = fact.size // factor
    if claims:
        _agree(claims, sizes, values)
