# SPDX-License-Identifier: Apache-2.0
"""From parameters as they are stored to the weights of each device's own stages.

A parameter of a stage keeps its name and its shape; it is stored in parts over the
pipeline's axis, so no device holds more than its share. At the beginning of a step each
device sends its part of every parameter to the device whose stage it belongs to: one
all-to-all for each form of array. Gradients go the same way back.
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
from tessera.spec import axes_of_dims, spec_of_axes


@dataclass(frozen=True)
class WeightForm:
    """What a weight must have in common with those it shares a slot with.

    Attributes:
      shape: Global shape.
      dtype: Its name.
      spec: How it is stored.
    """

    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec

    def dim_over(self, axis: str) -> int | None:
        """The dim whose parts are spread over an axis."""
        axes = axes_of_dims(self.spec, len(self.shape))
        return next((d for d, names in enumerate(axes) if axis in names), None)

    def without(self, axis: str) -> PartitionSpec:
        """How it is laid out where its stage runs."""
        axes = axes_of_dims(self.spec, len(self.shape))
        return spec_of_axes([tuple(a for a in names if a != axis) for names in axes])


@dataclass(frozen=True)
class StageWeights:
    """The weights of all virtual stages.

    Attributes:
      packing: Which slot each weight of each virtual stage has.
      mesh: Where they lie.
      axis: The pipeline's axis.
    """

    packing: Packing[WeightForm]
    mesh: Mesh
    axis: str

    def gather(self, weights: Sequence[Sequence[Array]]) -> list[Array]:
        """All slots, each ``[chunks, S, ...]``, split by stage over the axis.

        Args:
          weights: For each virtual stage, its arrays as they are stored.
        """
        if not self.packing.slots:
            return []

        # Derived by JAX, the way back would sum over axes along which there are copies.
        def forward(weights: list[list[Array]]) -> tuple[list[Array], None]:
            return self._gathered(weights), None

        def backward(_: None, slots: list[Array]) -> tuple[list[list[Array]]]:
            return (self._scattered(slots),)

        gather = jax.custom_vjp(self._gathered)
        gather.defvjp(forward, backward)
        return gather([list(arrays) for arrays in weights])

    def _gathered(self, weights: list[list[Array]]) -> list[Array]:
        return [
            self._slot(number, weights) for number in range(len(self.packing.slots))
        ]

    def _scattered(self, slots: list[Array]) -> list[list[Array]]:
        found: list[list[Any]] = [[None] * len(row) for row in self.packing.places]
        for number, slot in enumerate(slots):
            places = [p for p in self.packing.members(number) if p is not None]
            for (stage, place), part in zip(
                places, self._parts(number, slot), strict=True
            ):
                found[stage][place] = part
        return found

    def _slot(self, number: int, weights: Sequence[Sequence[Array]]) -> Array:
        form, size = self.packing.slots[number], self.mesh.shape[self.axis]
        members = self.packing.members(number)
        given = [weights[place[0]][place[1]] for place in members if place is not None]

        def own(*parts: Array) -> Array:
            rest = iter(parts)
            rows = [
                jnp.zeros_like(parts[0]) if place is None else next(rest)
                for place in members
            ]
            groups = [rows[k : k + size] for k in range(0, len(rows), size)]
            chunks = [self._whole(form, jnp.stack(group)) for group in groups]
            return jnp.stack(chunks)[:, None]

        return jax.shard_map(
            own,
            mesh=region_mesh(self.mesh),
            in_specs=form.spec,
            out_specs=self._slot_spec(form),
            check_vma=False,
        )(*given)

    def _parts(self, number: int, slot: Array) -> list[Array]:
        """The members of a slot as they are stored."""
        form = self.packing.slots[number]
        members = self.packing.members(number)

        def parts(slot: Array) -> list[Array]:
            rows = [row for chunk in slot[:, 0] for row in self._spread(form, chunk)]
            pairs = zip(members, rows, strict=True)
            return [row for place, row in pairs if place is not None]

        return jax.shard_map(
            parts,
            mesh=region_mesh(self.mesh),
            in_specs=self._slot_spec(form),
            out_specs=form.spec,
            check_vma=False,
        )(slot)

    def _slot_spec(self, form: WeightForm) -> PartitionSpec:
        return PartitionSpec(None, self.axis, *form.without(self.axis))

    def _whole(self, form: WeightForm, rows: Array) -> Array:
        """This device's array, from its part of that of each stage."""
        dim = form.dim_over(self.axis)
        if dim is None:
            place = jax.lax.axis_index(self.axis)
            return jax.lax.dynamic_index_in_dim(rows, place, 0, keepdims=False)
        parts = jax.lax.all_to_all(rows, self.axis, split_axis=0, concat_axis=0)
        parts = jnp.moveaxis(parts, 0, dim)
        shape = parts.shape
        return parts.reshape(*shape[:dim], -1, *shape[dim + 2 :])

    def _spread(self, form: WeightForm, own: Array) -> Array:
        """This device's part of the array of each stage, from its own array."""
        dim, size = form.dim_over(self.axis), self.mesh.shape[self.axis]
        if dim is None:
            return jax.lax.all_gather(own, self.axis)
        shape = own.shape
        parts = own.reshape(*shape[:dim], size, -1, *shape[dim + 1 :])
        rows = jnp.moveaxis(parts, dim, 0)
        return jax.lax.all_to_all(rows, self.axis, split_axis=0, concat_axis=0)

    def constrain(self, held: Sequence[Any]) -> list[Any]:
        """One virtual stage's slots in the region, laid out over the other axes."""
        return [
            scope.constrain(array, self.mesh, form.without(self.axis))
            for array, form in zip(held, self.packing.slots, strict=True)
        ]
