# SPDX-License-Identifier: Apache-2.0
"""The type of a pytree, and the names of its leaves."""

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
