# SPDX-License-Identifier: Apache-2.0
"""Trees of parameters: whether one is that of a model, and its layouts on a mesh."""

from typing import TypeAlias

import jax
from jax.sharding import PartitionSpec

from tessera.errors import AxisReusedError, ParameterTreeError, ShardDivisibilityError
from tessera.foundations.tree import Tree, named_leaves, path_name
from tessera.train.models.partition_rules import Placement, joined

# Logical names of a parameter's dims; None is a dim that is never sharded.
DimNames: TypeAlias = tuple[str | None, ...]


def check_tree(params: Tree, expected: Tree) -> None:
    """Check that two trees have the same names and shapes.

    Raises:
      ParameterTreeError: [T306] names or shapes are not those that are expected.
    """
    actual, declared = (
        {name: leaf.shape for name, leaf in named_leaves(tree).items()}
        for tree in (params, expected)
    )
    problems = [
        f"{path!r}: {actual.get(path, 'missing')}, expected "
        f"{declared.get(path, 'no such parameter')}"
        for path in sorted(actual.keys() | declared.keys())
        if actual.get(path) != declared.get(path)
    ]
    if problems:
        raise ParameterTreeError(
            "these are not the parameters of this model",
            got="\n".join(problems),
            fix="create them with model.init(key), or compare with model.abstract()",
        )


def layouts_of(shapes: Tree, names: Tree, place: Placement) -> Tree:
    """The PartitionSpec of every parameter.

    Args:
      shapes: Their global shapes.
      names: The logical names of their dims.
      place: What these names are on a mesh.

    Raises:
      ShardDivisibilityError: [T201] dims are not multiples of their axes' sizes.
      AxisReusedError: [T202] an axis would shard two dims of a parameter.
    """
    failed: list[ShardDivisibilityError] = []

    def layout(
        path: tuple[object, ...], leaf: jax.ShapeDtypeStruct, names: DimNames
    ) -> PartitionSpec | None:
        try:
            return place.resolve(names, leaf.shape, f"parameter {path_name(path)!r}")
        except ShardDivisibilityError as error:
            failed.append(error)
            return None
        except AxisReusedError as error:
            raise AxisReusedError(
                f"two dims of parameter {path_name(path)!r} are sharded over the "
                "same mesh axis",
                got=f"dims {names}; {error.got}",
                fix="give one of them a name that other axes shard, or none",
            ) from error

    layouts = jax.tree_util.tree_map_with_path(layout, shapes, names)
    if failed:
        raise joined(failed)
    return layouts
