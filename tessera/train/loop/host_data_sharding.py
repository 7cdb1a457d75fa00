# SPDX-License-Identifier: Apache-2.0
"""Host data sharding: the rows that each process reads, as global arrays.

A process reads the rows of its own devices and no others, wherever the mesh puts them.
Processes whose devices hold different rows read different parts of a batch; those that
hold copies of the same rows, as with ``tp`` over several machines, read the same part.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from tessera.mesh import Mesh


@dataclass(frozen=True)
class HostShard:
    """The part of every batch that this process reads: the p-th of P equal ones.

    Attributes:
      mesh: The mesh; its devices exist.
      index: p.
      count: P.
    """

    mesh: Mesh
    index: int = 0
    count: int = 1

    @classmethod
    def of(cls, mesh: Mesh, axes: tuple[str, ...]) -> "HostShard":
        """The smallest part that holds all rows of this process's devices.

        Args:
          mesh: The mesh.
          axes: Those that split the batch, outer first.
        """
        me = jax.process_index()
        positions = {
            _position(mesh.coordinates(at), axes, mesh.shape)
            for at, device in enumerate(mesh.jax.devices.flat)
            if device.process_index == me
        }
        return cls(mesh, *_part(positions, mesh.axis_size(axes) if axes else 1))

    def to_global(
        self, batch: Mapping[str, np.ndarray], spec: PartitionSpec, *, dim: int
    ) -> dict[str, jax.Array]:
        """This process's part of a batch, as arrays of all processes.

        Args:
          batch: Arrays of this process's rows.
          spec: The layout of the whole.
          dim: The dim that counts rows.
        """
        sharding = NamedSharding(self.mesh.jax, spec)
        return {
            name: self._array(array, sharding, dim) for name, array in batch.items()
        }

    def _array(self, array: np.ndarray, sharding: NamedSharding, dim: int) -> jax.Array:
        if jax.process_count() == 1:
            return jax.device_put(array, sharding)
        mine = array.shape[dim]
        shape = (*array.shape[:dim], mine * self.count, *array.shape[dim + 1 :])

        def block(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None, "an array of rows has dims"
            start, stop, _ = index[dim].indices(shape[dim])
            own = slice(start - self.index * mine, stop - self.index * mine)
            return array[(*index[:dim], own, *index[dim + 1 :])]

        return jax.make_array_from_callback(shape, sharding, block)


def on_every_host(array: jax.Array) -> np.ndarray:
    """The whole array, in every process; all processes call it."""
    if jax.process_count() > 1:
        return np.asarray(multihost_utils.process_allgather(array, tiled=True))
    return np.asarray(array)


def _position(
    coordinates: Mapping[str, int], axes: tuple[str, ...], sizes: Mapping[str, int]
) -> int:
    """Where a device stands along some axes, counted row by row."""
    position = 0
    for axis in axes:
        position = position * sizes[axis] + coordinates[axis]
    return position


def _part(positions: set[int], count: int) -> tuple[int, int]:
    """The smallest of equal parts of ``range(count)`` that holds some positions.

    Example:
      >>> _part({4, 5}, 8), _part({0, 2}, 4), _part({3, 4}, 8)
      ((2, 4), (0, 1), (0, 1))
    """
    for parts in (n for n in range(count, 0, -1) if count % n == 0):
        places = {position * parts // count for position in positions}
        if len(places) == 1:
            return places.pop(), parts
    raise AssertionError("one part holds everything")
