# SPDX-License-Identifier: Apache-2.0
"""``training.numerics=deterministic``: a step whose bits no mesh changes.

The devices of all axes share the parts of the batch. Each computes its own one
after the other with gathered parameters, and gradients are added in one tree
(``deterministic_sums``). Every device computes norms of whole gradients; the
optimizer update is element-wise. Axes like ``tp`` and ``pp`` split only what is stored:
docs/contributing/decisions/0050-deterministic-steps-by-rows.md says why.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from jax.sharding import PartitionSpec

from tessera.foundations.tree import Tree
from tessera.mesh import Mesh
from tessera.ops.clipping import global_norm
from tessera.ops.operand_layouts import gathered, region_mesh
from tessera.tracing.scope import constrain, round_alike
from tessera.train.loop.deterministic_sums import (
    optimization_barrier,
    pairwise_sum,
    sum_of_rounds,
    sum_over_devices,
)
from tessera.train.models.model import Batch, Model
from tessera.train.models.partition_rules import Placement


@dataclass(frozen=True)
class FixedOrder:
    """How the sums of a step are made where their order is fixed.

    Attributes:
      mesh: Where the step runs.
      model: Its model, as its parameters are stored.
      layouts: Those of the parameters.
      reduction_parts: Into how many parts the rows of a step are cut, a power of two.
    """

    mesh: Mesh
    model: Model
    layouts: Tree
    reduction_parts: int

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that share the parts, outer first.

        All of them in a step of the trainer. An evaluation of few rows leaves some out,
        whose devices compute the same.
        """
        shared: list[str] = []
        for axis in self.mesh.axes:
            if self.mesh.axis_size([*shared, axis]) <= self.reduction_parts:
                shared.append(axis)
        return tuple(shared)

    def of_rows(self, rows: int) -> "FixedOrder":
        """The order for an evaluation, whose rows may be fewer than parts."""
        return replace(self, reduction_parts=math.gcd(self.reduction_parts, rows))

    def summed(
        self,
        function: Callable[..., Tree],
        params: Tree,
        batch: Batch,
        *others: jax.Array,
    ) -> Tree:
        """The sum of ``function(params, part_of_batch, *others)`` over a batch.

        Args:
          function: Gives a tree of sums over the rows of ``[rows, ...]`` arrays.
          params: Parameters; ``function`` has them whole and without stages.
          batch: ``[microbatches, rows, ...]`` arrays, of which the data axes split the
            rows; these count as one sequence, however they are divided.
          others: What ``function`` takes beside them.

        Returns:
          What ``function`` gives, the same on every device.
        """
        axes = self.axes
        devices = self.mesh.axis_size(axes)
        is_shared_evenly = self.reduction_parts % devices == 0
        own = self.reduction_parts // devices if is_shared_evenly else 0
        split = PartitionSpec(None, Placement(self.mesh).axes("batch") or None)

        def sums(params: Tree, batch: Batch, *others: jax.Array) -> Tree:
            params = self.model.plain(jax.tree.map(gathered, params, self.layouts))
            batch = {name: gathered(rows, split) for name, rows in batch.items()}
            first = jax.lax.axis_index(axes) * own if axes else 0

            def part(index: jax.Array) -> Tree:
                def rows_of(array: jax.Array) -> jax.Array:
                    rows = array.shape[0] * array.shape[1] // self.reduction_parts
                    cut = array.reshape(self.reduction_parts, rows, *array.shape[2:])
                    return cut[first + index]

                part_of_batch = jax.tree.map(rows_of, batch)
                return optimization_barrier(function, params, part_of_batch, *others)

            if not is_shared_evenly:
                return sum_of_rounds(part, self.reduction_parts, axes, devices)
            return sum_over_devices(pairwise_sum(part, own), axes, devices)

        whole = PartitionSpec()
        specs = (self.layouts, split, *(whole for _ in others))
        return self._region(sums, specs, whole)(params, batch, *others)

    def whole(self, gradients: Tree) -> Tree:
        """Gradients that every device has and keeps, from which norms are computed."""
        whole = partial(constrain, mesh=self.mesh, spec=PartitionSpec())
        return jax.tree.map(whole, gradients)

    def norm(self, gradients: Tree) -> jax.Array:
        """``global_norm``, by every device of the whole gradients without stages."""

        def norm(gradients: Tree) -> jax.Array:
            return optimization_barrier(global_norm, self.model.plain(gradients))

        whole = PartitionSpec()
        return self._region(norm, whole, whole)(gradients)

    def by_element(
        self, update: Callable[..., Tree], layouts: Tree, state: Tree
    ) -> Callable[..., Tree]:
        """An optimizer's ``update``, by each device for its own blocks.

        Args:
          update: Acts on each number for itself, but for a norm that it is given.
          layouts: Those of gradients, parameters and updates.
          state: Those of the optimizer's state.
        """

        def with_norm(gradients: Tree, state: Tree, params: Tree, norm: Tree) -> Tree:
            return update(gradients, state, params, norm=norm)

        specs = (layouts, state, layouts, PartitionSpec())
        region = self._region(
            partial(optimization_barrier, with_norm), specs, (layouts, state)
        )

        def updated(gradients: Tree, state: Tree, params: Tree, *, norm: Tree) -> Tree:
            return region(gradients, state, params, norm)

        return updated

    def _region(
        self, function: Callable[..., Tree], in_specs: Tree, out_specs: Tree
    ) -> Any:
        round_alike()
        return jax.shard_map(
            function,
            mesh=region_mesh(self.mesh),
            in_specs=in_specs,
            out_specs=out_specs,
            # JAX cannot know that the tree ends with the same bits on all devices.
            check_vma=False,
        )
