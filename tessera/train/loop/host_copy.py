# SPDX-License-Identifier: Apache-2.0
"""Copies of sharded arrays in the memory of the host, compared by mesh position."""

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TypeAlias

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from tessera.foundations.tree import Tree
from tessera.mesh import Mesh

# By position in the mesh, of those of this process.
Shards: TypeAlias = dict[int, np.ndarray]


@dataclass(frozen=True)
class HostCopy:
    """A copy of this process's shards of several trees.

    Attributes:
      shards: Of each leaf. Equal copies of one block are one array.
      blocks: Of each leaf, which block of the global array a position has.
    """

    shards: list[Shards]
    blocks: list[dict[int, str]]

    @classmethod
    def of(cls, tree: Tree, mesh: Mesh) -> "HostCopy":
        """Copy arrays that are on a mesh."""
        positions = {device: at for at, device in enumerate(mesh.jax.devices.flat)}
        shards, blocks = list[Shards](), list[dict[int, str]]()
        for leaf in jax.tree.leaves(tree):
            distinct = defaultdict[str, list[np.ndarray]](list)
            mine, own_blocks = Shards(), dict[int, str]()
            for shard in leaf.addressable_shards:
                at, block = positions[shard.device], str(shard.index)
                own_blocks[at] = block
                mine[at] = _shared(np.asarray(shard.data), distinct[block])
            shards.append(mine)
            blocks.append(own_blocks)
        return cls(shards, blocks)

    def placed(self, structs: Tree) -> Tree:
        """The first leaves on devices again.

        Args:
          structs: ``jax.ShapeDtypeStruct`` s, of a mesh with positions as the copied.
        """
        leaves, treedef = jax.tree.flatten(structs)
        pairs = zip(leaves, self.shards, strict=False)
        return jax.tree.unflatten(treedef, [_placed(*pair) for pair in pairs])

    def odd_copies(self) -> set[int]:
        """The positions whose copy of a block is not the one that most have."""
        odd = set[int]()
        for shards, blocks in zip(self.shards, self.blocks, strict=True):
            copies = defaultdict[str, Counter[int]](Counter)
            for at, data in shards.items():
                copies[blocks[at]][id(data)] += 1
            for at, data in shards.items():
                (first, most), *others = copies[blocks[at]].most_common(2)
                is_tied = bool(others) and others[0][1] == most
                if is_tied or id(data) != first:
                    odd.add(at)
        return odd

    def unequal(self, other: "HostCopy") -> set[int]:
        """The positions where any bit differs."""
        return {
            at
            for mine, others in zip(self.shards, other.shards, strict=True)
            for at, data in mine.items()
            if not _is_same(data, others[at])
        }


def _shared(data: np.ndarray, known: list[np.ndarray]) -> np.ndarray:
    """An equal array of those that are known, or a copy that is then known too.

    A view of a CPU device's memory would change when a step donates it.
    """
    for other in known:
        if _is_same(data, other):
            return other
    known.append(np.array(data))
    return known[-1]


def _is_same(data: np.ndarray, other: np.ndarray) -> bool:
    """Whether two arrays have the same bits."""
    one, two = (np.ascontiguousarray(each).reshape(-1) for each in (data, other))
    return bool(np.array_equal(one.view(np.uint8), two.view(np.uint8)))


def _placed(struct: jax.ShapeDtypeStruct, shards: Shards) -> jax.Array:
    sharding = struct.sharding
    assert isinstance(sharding, NamedSharding), "every array of a run has a mesh"
    devices = sharding.mesh.devices.flat
    arrays = [
        jax.device_put(
            data,
            SingleDeviceSharding(devices[at], memory_kind=sharding.memory_kind),
            may_alias=False,
        )
        for at, data in shards.items()
    ]
    return jax.make_array_from_single_device_arrays(struct.shape, sharding, arrays)
