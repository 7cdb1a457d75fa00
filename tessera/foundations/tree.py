# SPDX-License-Identifier: Apache-2.0
"""Pytrees: their type, the names of their leaves, their arrays apart from the rest."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

import jax

Tree: TypeAlias = Any
"""A pytree: containers such as dicts, lists and tuples around arrays."""


def path_name(path: Any, root: str = "", separator: str = "/") -> str:
    """The name of a leaf by its path in a tree: ``encoder/block/0``.

    Args:
      path: As ``jax.tree_util.tree_flatten_with_path`` gives it.
      root: What the tree itself is called; comes first where there is one.
      separator: What stands between keys.

    Example:
      >>> paths, _ = jax.tree_util.tree_flatten_with_path({"up": [1, 2]})
      >>> [path_name(path, "encoder") for path, _ in paths]
      ['encoder/up/0', 'encoder/up/1']
    """
    inner = jax.tree_util.keystr(path, simple=True, separator=separator)
    return separator.join(filter(None, (root, inner)))


def named_leaves(tree: Tree, root: str = "", is_leaf: Any = None) -> dict[str, Any]:
    """The leaves of a tree by name.

    Example:
      >>> named_leaves({"up": [1, 2]})
      {'up/0': 1, 'up/1': 2}
    """
    paths = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]
    return {path_name(path, root): leaf for path, leaf in paths}


def is_childless(node: Any) -> bool:
    """Whether there is nothing inside a node: a leaf, None, an empty container."""
    return jax.tree.structure(node).num_nodes == 1


def nest(leaves: dict[str, Any]) -> dict[str, Any]:
    """A nested dict from one whose keys are names of leaves.

    Example:
      >>> nest({"encoder/up": 1, "encoder/down": 2, "table": 3})
      {'encoder': {'up': 1, 'down': 2}, 'table': 3}
    """
    tree: dict[str, Any] = {}
    for name, value in leaves.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return tree


@dataclass(frozen=True)
class Skeleton:
    """A tree without its arrays.

    Attributes:
      structure: JAX's tree definition of the whole tree.
      statics: The leaves that are no arrays, by position.
      paths: The path of each leaf.
    """

    structure: Any
    statics: Mapping[int, Any]
    paths: Sequence[Any] = ()

    @property
    def num_arrays(self) -> int:
        """How many arrays the tree has."""
        return self.structure.num_leaves - len(self.statics)

    def combine(self, arrays: Iterable[Any]) -> Tree:
        """The tree with these arrays; more of them than it has are left out."""
        statics, count = self.statics, self.structure.num_leaves
        if not statics:
            return jax.tree.unflatten(self.structure, islice(arrays, count))
        rest = iter(arrays)
        leaves = [statics[i] if i in statics else next(rest) for i in range(count)]
        return jax.tree.unflatten(self.structure, leaves)

    def names(self, root: str) -> list[str]:
        """The names of the arrays in a tree that is called ``root``."""
        named = enumerate(self.paths)
        return [path_name(path, root) for i, path in named if i not in self.statics]


def partition(
    tree: Tree, is_array: Callable[[Any], bool], is_leaf: Any = None
) -> tuple[list[Any], Skeleton]:
    """The arrays of a tree, and the tree without them.

    Args:
      tree: The tree.
      is_array: Whether a leaf is one of the arrays.
      is_leaf: As for ``jax.tree.flatten``.

    Example:
      >>> arrays, skeleton = partition({"x": 1.5, "name": "mlp"}, lambda x: x == 1.5)
      >>> arrays, skeleton.combine([2.5])
      ([1.5], {'name': 'mlp', 'x': 2.5})
    """
    found, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    statics = {i: leaf for i, (_, leaf) in enumerate(found) if not is_array(leaf)}
    arrays = [leaf for i, (_, leaf) in enumerate(found) if i not in statics]
    return arrays, Skeleton(structure, statics, [path for path, _ in found])


def zeros(like: Tree) -> Tree:
    """Zeros of the shapes and dtypes of a tree, without its layouts.

    Example:
      >>> zeros({"up": jax.ShapeDtypeStruct((2,), "float32")})
      {'up': Array([0., 0.], dtype=float32)}
    """

    def zeros(leaf: Any) -> jax.Array:
        return jax.numpy.zeros(leaf.shape, leaf.dtype)

    return jax.tree.map(zeros, like)
