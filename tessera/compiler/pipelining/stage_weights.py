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

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from tessera import scope
from tessera.compiler.pipelining.stage_packing import Packing
from tessera.mesh import Mesh
from tessera.ops.operand_layouts import region_mesh
from tessera.shard_spec import axes_of_dims, spec_of_axes


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

    def dim_over(self, axis: str) -> int | None:
        """The dim that is sharded over an axis, or None."""
        axes = axes_of_dims(self.spec, len(self.shape))
        return next((d for d, names in enumerate(axes) if axis in names), None)

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
    """

    packing: Packing[WeightForm]
    mesh: Mesh
    axis: str

    def gather(self, weights: Sequence[Sequence[Array]]) -> list[Array]:
        """All slots, each ``[chunks, S, ...]``, sharded by stage over the axis.

        Args:
          weights: For each virtual stage, its arrays as they are stored.
        """
        if not self.packing.slots:
            return []

        # The transpose that JAX derives sums over axes that weights are replicated on.
        def forward(weights: list[list[Array]]) -> tuple[list[Array], None]:
            return self._gather(weights), None

        def backward(_: None, slots: list[Array]) -> tuple[list[list[Array]]]:
            return (self._scatter(slots),)

        gather = jax.custom_vjp(self._gather)
        gather.defvjp(forward, backward)
        return gather([list(arrays) for arrays in weights])

    def _gather(self, weights: list[list[Array]]) -> list[Array]:
        return [
            self._slot(number, weights) for number in range(len(self.packing.slots))
        ]

    def _scatter(self, slots: list[Array]) -> list[list[Array]]:
        weights: list[list[Any]] = [[None] * len(row) for row in self.packing.indices]
        for number, slot in enumerate(slots):
            members = [m for m in self.packing.members(number) if m is not None]
            parts = zip(members, self._parts(number, slot), strict=True)
            for (stage, index), part in parts:
                weights[stage][index] = part
        return weights

    def _slot(self, number: int, weights: Sequence[Sequence[Array]]) -> Array:
        form, size = self.packing.slots[number], self.mesh.shape[self.axis]
        members = self.packing.members(number)
        arrays = [weights[m[0]][m[1]] for m in members if m is not None]

        def own(*parts: Array) -> Array:
            rest = iter(parts)
            rows = [
                jnp.zeros_like(parts[0]) if member is None else next(rest)
                for member in members
            ]
            groups = [rows[k : k + size] for k in range(0, len(rows), size)]
            chunks = [self._own_stage(form, jnp.stack(group)) for group in groups]
            return jnp.stack(chunks)[:, None]

        return jax.shard_map(
            own,
            mesh=region_mesh(self.mesh),
            in_specs=form.spec,
            out_specs=self._slot_spec(form),
            check_vma=False,
        )(*arrays)

    def _parts(self, number: int, slot: Array) -> list[Array]:
        """The weights in a slot, each in its stored layout."""
        form = self.packing.slots[number]
        members = self.packing.members(number)

        def parts(slot: Array) -> list[Array]:
            rows = [
                row for chunk in slot[:, 0] for row in self._own_shards(form, chunk)
            ]
            pairs = zip(members, rows, strict=True)
            return [row for member, row in pairs if member is not None]

        return jax.shard_map(
            parts,
            mesh=region_mesh(self.mesh),
            in_specs=self._slot_spec(form),
            out_specs=form.spec,
            check_vma=False,
        )(slot)

    def _slot_spec(self, form: WeightForm) -> PartitionSpec:
        return PartitionSpec(None, self.axis, *form.without(self.axis))

    def _own_stage(self, form: WeightForm, rows: Array) -> Array:
        """The weight of this device's stage, from its shard of every stage's."""
        dim = form.dim_over(self.axis)
        if dim is None:
            index = jax.lax.axis_index(self.axis)
            return jax.lax.dynamic_index_in_dim(rows, index, 0, keepdims=False)
        parts = jax.lax.all_to_all(rows, self.axis, split_axis=0, concat_axis=0)
        parts = jnp.moveaxis(parts, 0, dim)
        shape = parts.shape
        return parts.reshape(*shape[:dim], -1, *shape[dim + 2 :])

    def _own_shards(self, form: WeightForm, own: Array) -> Array:
        """This device's shard of every stage's weight, from that of its own stage."""
        dim, size = form.dim_over(self.axis), self.mesh.shape[self.axis]
        if dim is None:
            return jax.lax.all_gather(own, self.axis)
        shape = own.shape
        parts = own.reshape(*shape[:dim], size, -1, *shape[dim + 1 :])
        rows = jnp.moveaxis(parts, dim, 0)
        return jax.lax.all_to_all(rows, self.axis, split_axis=0, concat_axis=0)

    def constrain(self, slots: Sequence[Any]) -> list[Any]:
        """One virtual stage's slots, laid out over the axes that are not manual."""
        return [
            scope.constrain(array, self.mesh, form.without(self.axis))
            for array, form in zip(slots, self.packing.slots, strict=True)
        ]
