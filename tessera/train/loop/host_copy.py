# SPDX-License-Identifier: Apache-2.0
"""Copies of sharded arrays in the memory of the host, compared by mesh position."""

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Final, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from tessera.foundations.tree import Tree, named_leaves
from tessera.mesh import Mesh

# How far results may be apart that sums in another order gave, as a share of what the
# step changes: of narrow numbers, and of gradients that Adam divides by almost nothing.
_BOUND: Final = 0.1
# And as a share of the values themselves, whose last bits may differ.
_ROUNDING: Final = 1e-6
# Metrics that are compared so; differences of close numbers, as a z-score, are not.
_METRICS: Final = ("loss", "grad_norm")

# By position in the mesh, of those of this process.
Shards: TypeAlias = dict[int, np.ndarray]


@dataclass(frozen=True)
class HostCopy:
    """A copy of this process's shards of several trees.

    Attributes:
      names: Of each leaf, by its path, which begins with the number of its tree.
      shards: Of each leaf. Equal copies of one block are one array.
      blocks: Of each leaf, which block of the global array a position has.
    """

    names: list[str]
    shards: list[Shards]
    blocks: list[dict[int, str]]

    @classmethod
    def of(cls, tree: Tree, mesh: Mesh) -> "HostCopy":
        """Copy arrays that are on a mesh."""
        positions = {device: at for at, device in enumerate(mesh.jax.devices.flat)}
        leaves = named_leaves(tree)
        shards, blocks = list[Shards](), list[dict[int, str]]()
        for leaf in leaves.values():
            distinct = defaultdict[str, list[np.ndarray]](list)
            mine, own_blocks = Shards(), dict[int, str]()
            for shard in leaf.addressable_shards:
                at, block = positions[shard.device], str(shard.index)
                own_blocks[at] = block
                mine[at] = _shared(np.asarray(shard.data), distinct[block])
            shards.append(mine)
            blocks.append(own_blocks)
        return cls(list(leaves), shards, blocks)

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

    def far(self, other: "HostCopy", before: "HostCopy") -> set[int]:
        """The positions where more differs than another order of sums explains.

        For each part of the state, such as ``params``, it is the norm of the difference
        of all arrays that counts: single values may turn out otherwise, as those whose
        gradient is nothing but rounding do under Adam.

        Args:
          other: The same arrays, computed again.
          before: The state before, the first leaves of these.
        """
        far = set[int]()
        # For each position and part: squares of the difference, the change, the value.
        sums = defaultdict[tuple[int, str], np.ndarray](lambda: np.zeros(3))
        for index, (name, mine) in enumerate(zip(self.names, self.shards, strict=True)):
            tree, part, *_ = name.split("/")
            if tree != "0" and part not in _METRICS:
                continue
            old = before.shards[index] if tree == "0" else {}
            for at, data in mine.items():
                again = other.shards[index][at]
                if jnp.issubdtype(data.dtype, jnp.floating):
                    sums[at, part] += _squares(data, again, old.get(at))
                elif not _is_same(data, again):
                    far.add(at)
        for (at, _), (difference, change, size) in sums.items():
            bound = _BOUND * math.sqrt(change) + _ROUNDING * math.sqrt(size)
            # A difference that is no number is far.
            if not math.sqrt(difference) <= bound:
                far.add(at)
        return far


def _squares(data: np.ndarray, again: np.ndarray, old: np.ndarray | None) -> np.ndarray:
    """Sums of squares of the difference, of the change, and of the values.

    Values that are equal, or both NaN, do not differ and do not change.
    """
    first, second = data.astype(np.float64), again.astype(np.float64)
    start = np.zeros_like(first) if old is None else old.astype(np.float64)
    is_same = (first == second) | (np.isnan(first) & np.isnan(second))
    is_finite = np.isfinite(first)
    with np.errstate(invalid="ignore"):
        difference = np.where(is_same, 0.0, first - second)
        change = np.where(is_finite, first - start, 0.0)
    size = np.where(is_finite, first, 0.0)
    return np.array([np.square(each).sum() for each in (difference, change, size)])


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
