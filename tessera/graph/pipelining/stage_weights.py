# SPDX-License-Identifier: Apache-2.0
"""Gathers each device's stage weights from parameters that are sharded over the axis.

A parameter of a stage keeps its name and its shape; it is sharded over the pipeline's
axis, so no device stores more than its share. At the beginning of a step each device
sends its shard of every parameter to the device whose stage reads it: one all-to-all
for each shape, dtype and layout. Gradients return the same way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from tessera.graph.pipelining.stage_packing import Packing
from tessera.mesh import Mesh
from tessera.ops.operand_layouts import region_mesh
from tessera.shard_spec import axes_of_dims, spec_of_axes
from tessera.tracing import scope


@dataclass(frozen=True)
class WeightForm:
    """What weights that share a slot have in common.

    Attributes:
      shape: Global shape.
      dtype: Its name.
      spec: Layout of the stored parameter.
    """

    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec

    def without(self, axis: str) -> PartitionSpec:
        """The layout where its stage runs: the axis left out."""
        axes = axes_of_dims(self.spec, len(self.shape))
        return spec_of_axes([tuple(a for a in names if a != axis) for names in axes])


@dataclass(frozen=True)
class StageWeights:
    """The weights of all virtual stages.

    Attributes:
      packing: Which slot each weight of each virtual stage has.
      mesh: The mesh.
      axis: The pipeline's axis.
      numbers: int ``[chunks, S]``, the virtual stage of each chunk of each device.
    """

    packing: Packing[WeightForm]
    mesh: Mesh
    axis: str
    numbers: np.ndarray

    def gather(self, weights: Sequence[Sequence[Array]]) -> list[Array]:
        """All slots, each ``[chunks, S, ...]``, sharded by stage over the axis.

        Args:
          weights: For each virtual stage, its arrays as they are stored.

        Raises:
          LayoutMismatchError: [T205] an axis of the mesh is Explicit.
        """
        region_mesh(self.mesh)  # checks the axes
        return [
            self._slot(number, weights) for number in range(len(self.packing.slots))
        ]

    def _slot(self, number: int, weights: Sequence[Sequence[Array]]) -> Array:
        form = self.packing.slots[number]
        members = self.packing.members(number)
        placed = [members[stage] for stage in self.numbers.flat]
        arrays = [None if m is None else weights[m[0]][m[1]] for m in placed]
        empty = jnp.zeros(form.shape, form.dtype)
        stacked = jnp.stack([empty if array is None else array for array in arrays])
        stacked = stacked.reshape(*self.numbers.shape, *form.shape)
        # From one layout to the other XLA moves the axis by an all-to-all; the
        # transposed constraints do the same for the gradients.
        stored = PartitionSpec(None, None, *form.spec)
        by_stage = PartitionSpec(None, self.axis, *form.without(self.axis))
        stacked = scope.constrain(stacked, self.mesh, stored)
        return scope.constrain(stacked, self.mesh, by_stage)

    def constrain(self, slots: Sequence[Any]) -> list[Any]:
        """One virtual stage's slots, laid out over the axes that are not manual."""
        return [
            scope.constrain(array, self.mesh, form.without(self.axis))
            for array, form in zip(slots, self.packing.slots, strict=True)
        ]
