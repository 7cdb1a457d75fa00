# SPDX-License-Identifier: Apache-2.0
"""``training.zero_stage``: the layouts of parameters, gradients and optimizer state.

``tessera/graph/zero_layouts.py`` says how one array is split; here are the trees of a
model. What the axis ``fsdp`` splits, it splits at every stage: by the model's own
rules, all three of parameters, gradients and optimizer state. A stage is about the
copies along ``dp``.

Source: Rajbhandari et al., ZeRO, arXiv 1910.02054.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import jax
from jax.sharding import NamedSharding, PartitionSpec

from tessera.analysis.memory import format_bytes
from tessera.foundations.tree import Tree
from tessera.graph.zero_layouts import SPLIT_FROM, split_further
from tessera.mesh import Mesh
from tessera.shard import ShardSpec
from tessera.tracing.scope import constrain, record_layout
from tessera.train.models.model import Model

AXIS: Final = "dp"

_SCANNED: Final = (None, "stages", "layers")


@dataclass(frozen=True)
class Zero:
    """A stage of ZeRO, for one model on one mesh.

    Attributes:
      model: Whose parameters.
      mesh: Where they lie.
      stage: 0 splits nothing over ``dp``; 1 the optimizer state, 2 also the gradients,
        3 also the parameters.

    Example:
      >>> from tessera.train.models import DecoderModel, config_of
      >>> model = DecoderModel(config_of("tiny"))
      >>> zero = Zero(model, Mesh(["dp"], devices=range(8)), stage=1)
      >>> zero.optimizer_state["decoder"]["mlp"]["up"]["kernel"]
      P(None, None, 'dp')
      >>> zero.params["decoder"]["mlp"]["up"]["kernel"]
      P()
    """

    model: Model
    mesh: Mesh
    stage: int = 0

    @cached_property
    def params(self) -> Tree:
        """The layout of every parameter between steps."""
        return self.layouts("params")

    @cached_property
    def gradients(self) -> Tree:
        """The layout of every gradient, and of its sum over microbatches.

        This tree and ``optimizer_state`` have None for each frozen parameter.
        """
        return self.model.trained(self.layouts("gradients"))

    @cached_property
    def optimizer_state(self) -> Tree:
        """The layout of every array that the optimizer keeps for a parameter."""
        return self.model.trained(self.layouts("optimizer_state"))

    @property
    def abstract_gradients(self) -> Tree:
        """Shapes, dtypes and layouts of the gradients; nothing is allocated."""

        def struct(leaf: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
            sharding = NamedSharding(self.mesh.compile_mesh, spec)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        abstract = self.model.trained(self.model.abstract())
        return jax.tree.map(struct, abstract, self.gradients)

    @property
    def is_active(self) -> bool:
        """Whether there are copies along ``dp`` that the stage splits."""
        return self.stage > 0 and self.mesh.shape.get(AXIS, 1) > 1

    def split(self, spec: PartitionSpec, shape: tuple[int, ...]) -> PartitionSpec:
        """The layout of an array of the optimizer that is like no parameter."""
        return split_further(spec, shape, self.mesh, AXIS) if self.is_active else spec

    def declare_gradients(self, params: Tree) -> None:
        """Let ``ts.grad`` by the traced parameters give gradients in their layout."""
        for array, spec in zip(
            jax.tree.leaves(self.model.trained(params)),
            jax.tree.leaves(self.gradients),
            strict=True,
        ):
            record_layout(array, self.mesh, spec, of_gradient=True)

    def constrain_gradients(self, gradients: Tree) -> Tree:
        """Traced gradients in their layout; reduced into it where they are sums."""
        return self._constrained(gradients, self.gradients, "gradients")

    def constrain_shares(self, tree: Tree) -> Tree:
        """Traced gradients, parameters or updates, split like the optimizer state."""
        return self._constrained(tree, self.optimizer_state, "optimizer_state")

    def notes(self) -> list[str]:
        """What a reader of the setting would not expect, one sentence each."""
        if not self.stage:
            return []
        if not self.is_active:
            return [
                f"zero_stage {self.stage} changes nothing: there are no copies along "
                "'dp' to split; what 'fsdp' splits is split at every stage"
            ]
        whole = [
            leaf
            for leaf, before, after in zip(
                jax.tree.leaves(self.model.trained(self.model.abstract())),
                jax.tree.leaves(self.model.trained(self.model.layouts(self.mesh))),
                jax.tree.leaves(self.optimizer_state),
                strict=True,
            )
            if before == after
        ]
        if not whole:
            return []
        size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in whole)
        return [
            f"zero_stage {self.stage} leaves {len(whole)} parameters "
            f"({format_bytes(size)}) with a copy on each device of 'dp': it divides "
            "none of their dims"
        ]

    def layouts(self, what: str) -> Tree:
        """The layouts of ``params``, ``gradients`` or ``optimizer_state``.

        Of all parameters, as if none were frozen.
        """
        layouts = self.model.layouts(self.mesh)
        if not self.is_active or self.stage < SPLIT_FROM[what]:
            return layouts

        def split(spec: PartitionSpec, leaf: Any, named: ShardSpec) -> PartitionSpec:
            # A scan over layers takes one layer at a time: all devices need it at once.
            keep = [d for d, name in enumerate(named.mesh_axes) if name in _SCANNED]
            return split_further(spec, leaf.shape, self.mesh, AXIS, keep=keep)

        return jax.tree.map(split, layouts, self.model.abstract(), self.model.specs())

    def _constrained(self, tree: Tree, layouts: Tree, what: str) -> Tree:
        if not self.is_active or self.stage < SPLIT_FROM[what]:
            return tree

        def constrained(array: jax.Array, spec: PartitionSpec) -> jax.Array:
            return constrain(array, self.mesh, spec)

        return jax.tree.map(constrained, tree, layouts)
