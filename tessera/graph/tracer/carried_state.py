# SPDX-License-Identifier: Apache-2.0
"""Infers which part of the arguments each result of a step replaces in the next call.

A result with the tree, shapes and dtypes of an argument, or of a part of one, gets its
layout, so that the next call takes it as it is. Among several candidates with different
layouts it replaces the one that it is a new value of, or the one that no other result
replaces.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import PartitionSpec

from tessera.errors import UndecidedRoleError

Layouts: TypeAlias = tuple[PartitionSpec | None, ...]


@dataclass(frozen=True)
class Subtree:
    """A part of the arguments of a call, or of a result.

    Attributes:
      tree: Its structure.
      leaves: Its leaves; of arrays their types.
      keys: The path of each array, in the arguments or in the result; None for what is
        no array.
    """

    tree: Any
    leaves: tuple[Any, ...]
    keys: tuple[Any, ...]

    @classmethod
    def of(cls, tree: Any, keys: Sequence[str]) -> "Subtree":
        """A whole tree; ``keys`` are the paths of its arrays, in order."""
        leaves, structure = jax.tree.flatten(tree)
        rest = iter(keys)
        given = tuple(next(rest) if is_array(leaf) else None for leaf in leaves)
        return cls(structure, tuple(leaves), given)

    @property
    def is_bare(self) -> bool:
        """Whether it is a single array without a container."""
        return jax.tree_util.treedef_is_leaf(self.tree)

    @property
    def form(self) -> Any:
        """Structure, shapes and dtypes; leaves that are no arrays do not count."""
        forms = [
            (tuple(x.shape), x.dtype) if is_array(x) else None for x in self.leaves
        ]
        return self.tree, tuple(forms)

    def children(self) -> Iterator["Subtree"]:
        """Its parts one level down."""
        start = 0
        for tree in self.tree.children():
            span = slice(start, start := start + tree.num_leaves)
            yield Subtree(tree, self.leaves[span], self.keys[span])

    def parts(self) -> Iterator["Subtree"]:
        """Itself and all parts inside that have an array."""
        if any(map(is_array, self.leaves)):
            yield self
            for child in self.children():
                yield from child.parts()


def is_array(leaf: Any) -> bool:
    """Whether a leaf is the type of a numeric array; others, of strings, are static."""
    is_typed = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    return is_typed and not isinstance(leaf, np.ndarray)


def results_in_parts(result: Subtree, arguments: Sequence[Subtree]) -> list[Subtree]:
    """A result, taken apart as far as its parts are like no part of the arguments."""
    forms = [part.form for argument in arguments for part in argument.parts()]

    def split(part: Subtree) -> Iterator[Subtree]:
        children = list(part.children())
        if part.form in forms or not children:
            yield part
        for child in children if part.form not in forms else ():
            yield from split(child)

    return list(split(result))


def layouts_of_results(
    results: Sequence[Subtree],
    arguments: Sequence[Subtree],
    layouts: Mapping[str, PartitionSpec],
    updated: Mapping[str, Collection[str]],
) -> list[Layouts]:
    """The layout of each leaf of some results; None for what replaces nothing.

    Args:
      results: The results.
      arguments: The arguments.
      layouts: Where the arguments' arrays lie, by path.
      updated: For each array of the results, by path, the arrays of the arguments that
        it is a new value of.

    Raises:
      UndecidedRoleError: [T324] nothing decides which one a result replaces.
    """
    known = [part for argument in arguments for part in argument.parts()]
    alike = [[p for p in known if p.form == result.form] for result in results]
    found: dict[int, Layouts] = {}
    taken: set[str] = set()

    def settle(number: int, parts: Sequence[Subtree]) -> None:
        laid_out = {tuple(map(layouts.get, part.keys)) for part in parts}
        if len(laid_out) == 1:
            found[number] = laid_out.pop()
            taken.update(parts[0].keys if len(parts) == 1 else ())

    for number, result in enumerate(results):
        new = [part for part in alike[number] if _is_new_value(result, part, updated)]
        if result.is_bare:  # a size says nothing
            alike[number] = new
        settle(number, new or alike[number])
    while open_ := [n for n, parts in enumerate(alike) if parts and n not in found]:
        for number in open_:
            settle(number, [p for p in alike[number] if taken.isdisjoint(p.keys)])
        if found.keys().isdisjoint(open_):
            raise _undecided(results[open_[0]], alike[open_[0]])
    blank = [(None,) * len(result.leaves) for result in results]
    return [found.get(number, blank[number]) for number in range(len(results))]


def _is_new_value(
    result: Subtree, part: Subtree, updated: Mapping[str, Collection[str]]
) -> bool:
    pairs = zip(part.keys, result.keys, strict=True)
    return all(key is None or key in updated[new] for key, new in pairs)


def _undecided(result: Subtree, parts: Sequence[Subtree]) -> UndecidedRoleError:
    first, *others = [next(filter(None, part.keys)) for part in (result, *parts)]
    return UndecidedRoleError(
        f"it is not decided which part of the arguments {first!r} and what is beside "
        "it replace",
        got=f"{', '.join(others)} and what is beside them are like it, and lie "
        "differently",
        fix="declare the layouts of all results: ts.function(out_specs=...)",
    )
