# SPDX-License-Identifier: Apache-2.0
"""``training.gradient_compression``: gradients cross ``dp`` in fewer bytes.

The step leaves gradients unreduced over ``dp``: each device has the gradients of its
own copy of the weights. ``CompressedExchange`` reduces them once per step, each device
its own shard of ``fsdp`` and ``tp``, by ``ops/averaging.py``. Other axes are not
affected.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from tessera.foundations.tree import Tree
from tessera.mesh import Mesh
from tessera.ops.gradient_averaging import ErrorFeedback, compressed_mean
from tessera.ops.operand_layouts import region_mesh
from tessera.train.models.model import Model

AXIS: Final = "dp"


@dataclass(frozen=True)
class CompressedExchange:
    """How the gradients of one model cross ``dp`` on one mesh.

    Attributes:
      model: Whose gradients.
      mesh: Where they lie; it has the axis ``dp``.
      compression: What is sent; ``none`` leaves the reduction to XLA.
      ratio: The share of its values that a device sends under ``top_k``.
    """

    model: Model
    mesh: Mesh
    compression: str = "none"
    ratio: float = 0.01

    @property
    def is_active(self) -> bool:
        """Whether the step has to leave its gradients unreduced."""
        return self.compression != "none"

    @cached_property
    def residual_specs(self) -> Tree | None:
        """The layout of what devices keep back; None where nothing is kept."""
        return self._copied_specs if self.compression == "top_k" else None

    @cached_property
    def abstract_residual(self) -> Tree | None:
        """Its shapes, f32 ``[dp, ...]`` for each parameter."""
        if self.residual_specs is None:
            return None
        lead = self.mesh.axis_size(AXIS)

        def copied(leaf: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((lead, *leaf.shape), jnp.float32)

        return jax.tree.map(copied, self.model.trained(self.model.abstract()))

    def first_residual(self) -> Tree | None:
        """What is kept back before the first step: zeros, each on its device."""
        if self.residual_specs is None:
            return None

        def zeros() -> Tree:
            def blank(leaf: jax.ShapeDtypeStruct) -> Array:
                return jnp.zeros(leaf.shape, leaf.dtype)

            return jax.tree.map(blank, self.abstract_residual)

        def placed(spec: PartitionSpec) -> NamedSharding:
            return NamedSharding(self.mesh.jax, spec)

        return jax.jit(zeros, out_shardings=jax.tree.map(placed, self.residual_specs))()

    def exchanged(self, gradients: Tree, residual: Tree | None) -> tuple[Tree, Tree]:
        """The sum over ``dp`` of what its devices have, and what they keep back.

        Args:
          gradients: For each parameter ``[dp, ...]``, each device's own, in a unit that
            does not change from step to step.
          residual: What the last call gave; None but for ``top_k``.

        Returns:
          For each parameter ``[...]``, alike along ``dp``; and the new residual.
        """
        region = jax.shard_map(
            self._sum_of_blocks,
            mesh=region_mesh(self.mesh),
            in_specs=(self._copied_specs, self.residual_specs),
            out_specs=(self._specs, self.residual_specs),
        )
        return region(gradients, residual)

    def _sum_of_blocks(self, gradients: Tree, residual: Tree | None) -> Any:
        exchange = compressed_mean(self.compression, AXIS, ratio=self.ratio)
        state = optax.EmptyState() if residual is None else ErrorFeedback(residual)
        own = jax.tree.map(_first, gradients)
        means, new_state = exchange.update(own, state)
        sums = jax.tree.map(self._times_copies, means)
        if isinstance(new_state, ErrorFeedback):
            return sums, new_state.residual
        return sums, None

    def _times_copies(self, mean: Array) -> Array:
        return mean * self.mesh.axis_size(AXIS)

    @cached_property
    def _specs(self) -> Tree:
        return self.model.trained(self.model.layouts(self.mesh))

    @cached_property
    def _copied_specs(self) -> Tree:
        def copied(spec: PartitionSpec) -> PartitionSpec:
            return PartitionSpec(AXIS, *spec)

        return jax.tree.map(copied, self._specs)


def _first(block: Array) -> Array:
    return block[0]
