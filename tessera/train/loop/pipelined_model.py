# SPDX-License-Identifier: Apache-2.0
"""Computes the gradients of a trainer's model that is split into pipeline stages.

The microbatches of the step are those of the pipeline. The first stage looks up the
embeddings, the last computes the logits and the loss; both read the embedding table,
which is sharded over ``pp`` and gathered once in a step.

The loop is that of ``graph.pipeline`` (``schedule_loop.py``). Unlike a user's stages,
these are one program for all: their layers are stored stacked, by stage, so no weight
is moved at the beginning of a step, and no branch is compiled for each stage.
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from tessera.foundations.tree import Tree
from tessera.graph.pipelining import Pipeline, Schedule, Stages, schedule
from tessera.mesh import Mesh
from tessera.shard_spec import axes_of_dims, spec_over
from tessera.tracing.casts import cast_parameter
from tessera.tracing.scope import constrain
from tessera.train.models.layer_scan import FULL
from tessera.train.models.model import Model, Sums
from tessera.train.models.partition_rules import Placement
from tessera.train.objectives.objective import NEXT_TOKEN, Objective


@dataclass(frozen=True)
class PipelinedModel:
    """A model that is split into stages, and their schedule.

    Attributes:
      model: The model; it has a ``split``.
      mesh: A mesh with an axis ``pp``.
      schedule: The schedule, for as many microbatches as a step has.
      gradient_layouts: Layouts of gradients; None for those of their parameters.
      loss_chunk: The number of tokens whose logits the last stage computes at a time.
      gathers_once: Whether parameters are gathered over ``fsdp`` before the first tick
        and gradients reduce-scattered after the last, not both in every tick.
      objective: The loss that the last stage computes.
    """

    model: Model
    mesh: Mesh
    schedule: Schedule
    gradient_layouts: Tree | None = None
    loss_chunk: int | str = "none"
    gathers_once: bool = False
    objective: Objective = NEXT_TOKEN

    def gradients(
        self, params: Tree, batch: Tree, seed: Float[Array, ""]
    ) -> tuple[Sums, Tree]:
        """Summed losses in nats, and gradients of ``seed`` times what is trained.

        Args:
          params: As from ``model.init``.
          batch: Arrays ``[M, B, S]``, replicated over ``pp``.
          seed: Scale of the gradients.
        """
        weights, shared = self._divided(params)
        result = self._pipeline(batch).gradients(weights, shared, batch, seed)
        gradients = self.model.join(result.weights, result.shared)
        of_blocks, of_head = result.statistics
        return {**of_head, **of_blocks}, gradients

    def sums(self, params: Tree, batch: Tree) -> Sums:
        """The sums of one microbatch ``[B, S]``, without gradients."""
        batch = jax.tree.map(partial(jnp.expand_dims, axis=0), batch)
        divided = self._divided(params)
        _, _, (of_blocks, of_head) = self._pipeline(batch).outputs(*divided, batch)
        return {**of_head, **of_blocks}

    def _pipeline(self, batch: Tree) -> Pipeline:
        split, numbers = self.model.split, self.schedule.stage_numbers
        assert split is not None, "the model of a pipeline has stages"
        placed = tuple(split.runs[stage] for stage in numbers.flat)
        assert split.layers == placed, "devices store the stages that they run"
        return Pipeline(
            self.schedule,
            self._stages(batch),
            self.mesh,
            "pp",
            self._data_axes,
            self.model.divide(self._layouts) if self.gathers_once else None,
        )

    @property
    def _data_axes(self) -> tuple[str, ...]:
        """Axes over which gradients are summed once in a step, not in every tick.

        Not ``dp`` where gradients are sharded over it (ZeRO), and none with experts,
        whose balance loss is over the tokens of all devices.
        """
        if self.model.couples_rows:
            return ()
        specs = jax.tree.leaves(self._layouts)
        is_sharded = any(
            "dp" in axes for spec in specs for axes in axes_of_dims(spec, 0)
        )
        once = {"dp": not is_sharded, "fsdp": self.gathers_once}
        sizes = self.mesh.shape
        return tuple(axis for axis in once if once[axis] and sizes.get(axis, 1) > 1)

    def _divided(self, params: Tree) -> tuple[Tree, Tree]:
        """The parameters of stages and the others, as the region takes them.

        Stages that gather once cast their parameters before. The others are cast where
        they are used: the loss adds up their gradients in a loop.
        """
        weights, shared = self.model.divide(params)
        if not self.gathers_once or self.model.dtype is None:
            return weights, shared
        dtype, (layouts, _) = self.model.dtype, self.model.divide(self._layouts)

        def cast(weight: Array, layout: PartitionSpec) -> Array:
            if spec_over(layout, ["fsdp"]) == PartitionSpec():
                return weight
            return constrain(cast_parameter(weight, dtype), self.mesh, layout)

        return jax.tree.map(cast, weights, layouts), shared

    @property
    def _layouts(self) -> Tree:
        if self.gradient_layouts is not None:
            return self.gradient_layouts
        return self.model.layouts(self.mesh)

    @property
    def _place(self) -> Placement:
        """The layout of a stage's activations in the SPMD region over ``pp``."""
        place = self.model.place(self.mesh)
        axes = place.vmapped_axes | {"pp", *self._data_axes}
        return replace(place, vmapped_axes=axes)

    def _stages(self, batch: Tree) -> Stages:
        place, (staged, _) = self._place, self.model.divide(self._layouts)
        _, rows, length = batch["tokens"].shape
        sent = place.between_stages(length)
        rows //= self.mesh.axis_size(self._data_axes)

        def constrain_weights(weights: Tree) -> Tree:
            return jax.tree.map(self._as_stored, weights, staged)

        return Stages(
            runs=[self._run],
            wire=self.model.wire(rows, length),
            head=self._head,
            recomputes=set(self.model.policies) == {FULL},
            constrain_wire=lambda wire: self.model.constrain_wire(wire, sent),
            constrain_weights=constrain_weights,
            has_copies=self.gathers_once,
        )

    def _as_stored(self, gradient: Array, layout: PartitionSpec) -> Array:
        """A virtual stage's gradient in the layout of the stacked gradients."""
        manual = {"pp", *self._data_axes}
        free = [axis for axis in self.mesh.axes if axis not in manual]
        return constrain(gradient, self.mesh, spec_over(layout[2:], free))

    def _run(
        self, weights: Tree, shared: Tree, wire: Array, micro: Tree, index: Array
    ) -> tuple[Array, Array, tuple[Tree, Tree]]:
        """One virtual stage on one microbatch.

        Args:
          weights: Of the blocks, the stage's own ``[depth, …]``.
          shared: The other parameters.
          wire: What the stage before has sent; the first one reads ``micro``.
          micro: See ``Model.loss``.
          index: The number of the stage.

        Returns:
          What is sent to the next stage, and both of ``Model.block_sums``.
        """
        model, place, split = self.model, self._place, self.model.split
        assert split is not None, "the model of a pipeline has stages"
        params = model.join(weights, shared)
        numbers = jnp.asarray(split.by_stage)
        own = jax.lax.dynamic_index_in_dim(numbers, index, 0, keepdims=False)
        wire = model.constrain_wire(wire, place)
        hidden = jax.lax.cond(
            index == 0, lambda: model.embed(params, micro, place), lambda: wire
        )
        hidden, statistics = model.run_blocks(params, hidden, micro, place, own)
        hidden = model.constrain_wire(hidden, place)
        extra, others = model.block_sums(statistics, self.objective.count(micro))
        return hidden, jnp.float32(extra), ((), others)

    def _head(
        self, weights: Tree, shared: Tree, out: tuple[Array, Tree], micro: Tree
    ) -> tuple[Array, Sums]:
        """The objective of one microbatch, from the last stage's hidden state."""
        params = self.model.join(weights, shared)
        sums = self.objective.sums(
            self.model, params, out[0], micro, self._place, self.loss_chunk
        )
        return sums["loss"], sums


def schedule_of(
    mesh: Mesh, name: str, chunks: int, accumulation: int
) -> Schedule | None:
    """The schedule for a number of microbatches; None where the mesh has no ``pp``.

    Raises:
      PipelineSizeError: [T311] the sizes do not make such a schedule.
    """
    if "pp" not in mesh.axes:
        return None
    is_chunked = name == "interleaved" or chunks > 1
    return schedule(
        name, mesh.shape["pp"], accumulation, chunks if is_chunked else None
    )
