# SPDX-License-Identifier: Apache-2.0
"""Which part of the arguments each result of a step replaces in the next one.

A result that has the tree, the shapes and the dtypes of an argument, or of a part of
one, is laid out like it, so that the next call finds it where it wants it. Of several
that are alike and lie differently it replaces the one that it is a new value of, or
the one that no other result replaces.
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
class Part:
    """A part of the arguments of a call, or of a result.

    Attributes:
      tree: Its structure.
      leaves: Its leaves; of arrays their types.
      keys: What stands for each leaf elsewhere: its path in the arguments, its number
        among a program's results; None for what is no array.
    """

    tree: Any
    leaves: tuple[Any, ...]
    keys: tuple[Any, ...]

    @classmethod
    def of(cls, tree: Any, keys: Sequence[Any]) -> "Part":
        """A whole tree; ``keys`` are those of its arrays, in order."""
        leaves, structure = jax.tree.flatten(tree)
        rest = iter(keys)
        given = tuple(next(rest) if is_array(leaf) else None for leaf in leaves)
        return cls(structure, tuple(leaves), given)

    @property
    def is_bare(self) -> bool:
        """Whether it is one array and nothing around it."""
        return jax.tree_util.treedef_is_leaf(self.tree)

    @property
    def form(self) -> Any:
        """Structure, shapes and dtypes; nothing of a leaf that is no array."""
        forms = [
            (tuple(x.shape), x.dtype) if is_array(x) else None for x in self.leaves
        ]
        return self.tree, tuple(forms)

    def children(self) -> Iterator["Part"]:
        """What it is made of, one level down."""
        start = 0
        for tree in self.tree.children():
            place = slice(start, start := start + tree.num_leaves)
            yield Part(tree, self.leaves[place], self.keys[place])

    def parts(self) -> Iterator["Part"]:
        """Itself, and everything inside of it that has an array."""
        if any(map(is_array, self.leaves)):
            yield self
            for child in self.children():
                yield from child.parts()


def is_array(leaf: Any) -> bool:
    """Whether a leaf is the type of an array; what is static may be one of strings."""
    is_typed = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    return is_typed and not isinstance(leaf, np.ndarray)


def results_in_parts(result: Part, arguments: Sequence[Part]) -> list[Part]:
    """A result as a whole where it is like a part of the arguments, or its elements."""
    forms = [part.form for argument in arguments for part in argument.parts()]
    return [result] if result.form in forms else list(result.children()) or [result]


def layouts_of_results(
    results: Sequence[Part],
    arguments: Sequence[Part],
    layouts: Mapping[str, PartitionSpec],
    updated: Sequence[Collection[str]],
) -> list[Layouts]:
    """The layout of each leaf of some results; None for what replaces nothing.

    Args:
      results: The results; their keys are their numbers.
      arguments: The arguments; their keys are paths.
      layouts: Where the arguments' arrays lie, by path.
      updated: For each array among the results, the arguments that it is a new value
        of, by path.

    Raises:
      UndecidedRoleError: [T324] nothing decides which one a result replaces.
    """
    known = [part for argument in arguments for part in argument.parts()]
    alike = [[p for p in known if p.form == result.form] for result in results]
    found: dict[int, Layouts] = {}
    taken: set[str] = set()

    def settle(number: int, parts: Sequence[Part]) -> None:
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
            raise _undecided(open_[0], alike[open_[0]])
    blank = [(None,) * len(result.leaves) for result in results]
    return [found.get(number, blank[number]) for number in range(len(results))]


def _is_new_value(result: Part, part: Part, updated: Sequence[Collection[str]]) -> bool:
    pairs = zip(part.keys, result.keys, strict=True)
    return all(key is None or key in updated[number] for key, number in pairs)


def _undecided(number: int, parts: Sequence[Part]) -> UndecidedRoleError:
    named = [next(key for key in part.keys if key is not None) for part in parts]
    return UndecidedRoleError(
        f"it is not decided which part of the arguments result {number} replaces",
        got=f"those of {', '.join(named)} are like it, and lie differently",
        fix="say for each result what it is: results=['params', 'optimizer_state']",
    )
