# SPDX-License-Identifier: Apache-2.0
"""``StepConfig``: the model, optimizer, mesh and options of a training step."""

from dataclasses import dataclass
from functools import cached_property

import optax
from jax.sharding import PartitionSpec

from tessera.graph.pipelining import Schedule
from tessera.mesh import Mesh
from tessera.train.loop.deterministic_numerics import FixedOrder
from tessera.train.loop.optimizers import Schedule as LearningRate
from tessera.train.loop.pipelined_model import PipelinedModel
from tessera.train.loop.spikes import SpikeGuard
from tessera.train.loop.zero_stages import Zero
from tessera.train.models.model import Model
from tessera.train.models.partition_rules import Placement
from tessera.train.objectives.objective import NEXT_TOKEN, Objective


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """Everything that defines a training step, but for its arrays.

    Attributes:
      model: The model to train.
      optimizer: Its Optax transformation.
      learning_rate: The schedule inside it, for the metrics.
      mesh: Where it runs.
      accumulation: Microbatches in one step.
      sync_every: Microbatches between two reductions of the gradients over the data
        axes; divides ``accumulation``. Above 1 each device keeps whole gradients of its
        own in between.
      reduces_narrow: Whether devices add up gradients in the model's dtype of
        activations, and not in that of the parameters.
      zero_stage: What is split over ``dp``, see ``Zero``.
      offload_optimizer: Whether the optimizer's state comes from the memory of the host
        and goes back there; see ``offload``.
      schedule: The order of a pipeline over ``pp``, whose microbatches are those of the
        step; None where the mesh has no such axis.
      gathers_once: Whether its stages gather their parameters over ``fsdp`` once in a
        step; see ``PipelinedModel``.
      reduction_parts: With deterministic numerics, into how many parts the rows of the
        step are cut; None adds in any order.
      loss_chunk: Of how many tokens each device makes logits at a time: a number,
        ``auto``, or ``none`` for all of them.
      objective: The loss.
      keeps_reference: Whether the state has the parameters that the run began with.
      spikes: What is done about spikes of the loss and the gradients; None looks for
        none.
    """

    model: Model
    optimizer: optax.GradientTransformation
    learning_rate: LearningRate
    mesh: Mesh
    accumulation: int = 1
    sync_every: int = 1
    reduces_narrow: bool = False
    zero_stage: int = 0
    offload_optimizer: bool = False
    schedule: Schedule | None = None
    gathers_once: bool = False
    reduction_parts: int | None = None
    loss_chunk: int | str = "none"
    objective: Objective = NEXT_TOKEN
    keeps_reference: bool = False
    spikes: SpikeGuard | None = None

    @cached_property
    def pipeline(self) -> PipelinedModel | None:
        """The model in stages, where there is a pipeline."""
        if self.schedule is None or self.reduction_parts is not None:
            return None
        return PipelinedModel(
            self.model,
            self.mesh,
            self.schedule,
            self.zero.layouts("gradients"),
            self.loss_chunk,
            self.gathers_once,
            self.objective,
        )

    @cached_property
    def zero(self) -> Zero:
        """The layouts of parameters, gradients and optimizer state."""
        return Zero(self.model, self.mesh, self.zero_stage)

    @cached_property
    def fixed_order(self) -> FixedOrder | None:
        """How sums are made where their order is fixed."""
        if self.reduction_parts is None:
            return None
        return FixedOrder(self.mesh, self.model, self.zero.params, self.reduction_parts)

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The mesh axes that split the batch, outer first."""
        return Placement(self.mesh).axes("batch")


def batch_spec(config: StepConfig) -> PartitionSpec:
    """Layout of a step's batch: whole over microbatches, split over the data axes."""
    return PartitionSpec(None, config.data_axes or None)
