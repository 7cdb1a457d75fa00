# SPDX-License-Identifier: Apache-2.0
"""``training.numerics=deterministic``: a step whose bits dp and fsdp do not change.

Each device computes its microshards of the batch one after the other with gathered
parameters, and gradients are added in one tree (``ops/fixed_order.py``). Every device
computes norms of whole gradients; the optimizer update is element-wise.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import jax
from jax.sharding import PartitionSpec

from tessera.errors import SettingConflictError
from tessera.mesh import Mesh
from tessera.ops.clipping import global_norm
from tessera.ops.deterministic_sums import (
    optimization_barrier,
    pairwise_sum,
    sequential_sum,
    sum_over_devices,
)
from tessera.ops.operand_layouts import region_mesh
from tessera.tree import Tree

_FLAG: Final = "--xla_gpu_deterministic_ops=true"


@dataclass(frozen=True)
class FixedOrder:
    """How the sums of a step are made where their order is fixed.

    Attributes:
      mesh: Where the step runs.
      axes: Its axes that split the batch, outer first; no other axis splits anything.
      microshards: Into how many parts the rows of a microbatch are cut; the size of
        ``axes`` divides it, and both are powers of two.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    microshards: int

    def summed(
        self, function: Callable[[Tree, Tree], Tree], params: Tree, batch: Tree
    ) -> Tree:
        """The sum of ``function(params, microshard)`` over a batch.

        Args:
          function: Gives a tree of sums over the rows of ``[rows, ...]`` arrays.
          params: Parameters, of any layout; ``function`` has them whole.
          batch: ``[microbatches, rows, ...]`` arrays, split over ``axes``.

        Returns:
          What ``function`` gives, the same on every device.
        """
        devices = self.mesh.axis_size(self.axes)
        own = self.microshards // devices

        def sums(params: Tree, batch: Tree) -> Tree:
            def part(microshard: jax.Array, microbatch: jax.Array) -> Tree:
                def rows_of(array: jax.Array) -> jax.Array:
                    rows = array.shape[1] // own
                    cut = array.reshape(array.shape[0], own, rows, *array.shape[2:])
                    return cut[microbatch, microshard]

                return optimization_barrier(
                    function, params, jax.tree.map(rows_of, batch)
                )

            def leaf(microshard: jax.Array) -> Tree:
                count = jax.tree.leaves(batch)[0].shape[0]
                return sequential_sum(lambda index: part(microshard, index), count)

            return sum_over_devices(pairwise_sum(leaf, own), self.axes, devices)

        split = PartitionSpec(None, self.axes or None)
        whole = PartitionSpec()
        return self._region(sums, (whole, split), whole)(params, batch)

    def norm(self, tree: Tree) -> jax.Array:
        """``global_norm``, by every device of the whole tree."""
        whole = PartitionSpec()
        return self._region(
            partial(optimization_barrier, global_norm), (whole,), whole
        )(tree)

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
        return jax.shard_map(
            function,
            mesh=region_mesh(self.mesh),
            in_specs=in_specs,
            out_specs=out_specs,
            # JAX cannot know that the tree ends with the same bits on all devices.
            check_vma=False,
        )


def check_accelerator() -> None:
    """Demand of GPUs the flag without which their kernels add in any order.

    Raises:
      SettingConflictError: [T507] the flag is not set.
    """
    if jax.default_backend() == "gpu" and _FLAG not in os.environ.get("XLA_FLAGS", ""):
        raise SettingConflictError(
            "kernels of GPUs add in any order unless XLA is told not to",
            got="training.numerics=deterministic, "
            f"XLA_FLAGS={os.environ.get('XLA_FLAGS', '')!r}",
            fix=f"set XLA_FLAGS={_FLAG} before the run, or use training.numerics=fast",
        )
