# SPDX-License-Identifier: Apache-2.0
"""The trainer's step: a Tessera function like any user's.

One optimizer step over ``accumulation`` microbatches. Gradients are summed over tokens
and divided by their number at the end, so an accumulated step is the step of the full
batch, however many tokens of each microbatch count.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from tessera.api.function import Function, function
from tessera.compiler.gradient_primitive import grad
from tessera.compiler.pipelining.schedule_table import Schedule
from tessera.mesh import Mesh
from tessera.models.model import Model
from tessera.models.partition_rules import NO_MESH, Placement
from tessera.ops.clipping import global_norm
from tessera.ops.loss_scale import LossScale
from tessera.scope import autocast, constrain
from tessera.training.gradient_compression import AXIS, CompressedExchange
from tessera.training.numerics import FixedOrder
from tessera.training.offload import fetched, stored
from tessera.training.optimizers import Schedule as LearningRate
from tessera.training.pipelined import PipelinedModel
from tessera.training.router import ROUTER_METRICS, router_sums
from tessera.training.train_state import TrainState, state_specs
from tessera.training.zero_stages import Zero
from tessera.tree import Tree

IGNORED = -100

Batch: TypeAlias = Mapping[str, Int[Array, "..."]]
# Of the numbers that a step shows: the loss and, with experts, the routers'.
Sums: TypeAlias = dict[str, Float[Array, ""]]


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """What a step is made of.

    Attributes:
      model: The model to train.
      optimizer: Its Optax transformation.
      learning_rate: The schedule inside it, for the metrics.
      mesh: Where it runs.
      accumulation: Microbatches in one step.
      sync_every: Microbatches between two reductions of the gradients over the data
        axes; divides ``accumulation``. Above 1 each device keeps whole gradients of its
        own in between.
      dtype: Dtype of matmuls: ``f32``, ``bf16`` or ``f16``.
      zero_stage: What is split over ``dp``, as ``zero`` says.
      offload_optimizer: Whether the optimizer's state comes from the memory of the host
        and goes back there; see ``offload``.
      compression: What is sent of the gradients over ``dp``; ``exchange`` does it.
      compression_ratio: The share of them that ``top_k`` sends.
      schedule: The order of a pipeline over ``pp``, whose microbatches are those of the
        step; None where the mesh has no such axis.
      microshards: With deterministic numerics, into how many parts the rows of a
        microbatch are cut; None adds in any order.
      loss_chunk: Of how many tokens each device makes logits at a time: a number,
        ``auto``, or ``none`` for all of them.
    """

    model: Model
    optimizer: optax.GradientTransformation
    learning_rate: LearningRate
    mesh: Mesh
    accumulation: int = 1
    sync_every: int = 1
    dtype: str = "f32"
    zero_stage: int = 0
    offload_optimizer: bool = False
    compression: str = "none"
    compression_ratio: float = 0.01
    schedule: Schedule | None = None
    microshards: int | None = None
    loss_chunk: int | str = "none"

    @cached_property
    def pipeline(self) -> PipelinedModel | None:
        """The model in stages, where there is a pipeline."""
        if self.schedule is None:
            return None
        return PipelinedModel(
            self.model,
            self.mesh,
            self.schedule,
            self.dtype,
            self.zero.gradients,
            self.loss_chunk,
        )

    @cached_property
    def zero(self) -> Zero:
        """The layouts of parameters, gradients and optimizer state."""
        return Zero(self.model, self.mesh, self.zero_stage)

    @cached_property
    def exchange(self) -> CompressedExchange:
        """How gradients cross ``dp`` where they are compressed."""
        return CompressedExchange(
            self.model, self.mesh, self.compression, self.compression_ratio
        )

    @cached_property
    def fixed_order(self) -> FixedOrder | None:
        """How sums are made where their order is fixed."""
        if self.microshards is None:
            return None
        return FixedOrder(self.mesh, self.data_axes, self.microshards)

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The mesh axes that split the batch, outer first."""
        return Placement(self.mesh).axes("batch")


def make_train_step(config: StepConfig, state: TrainState) -> Function:
    """Compile-ready function ``(state, batch) -> (state, metrics)``.

    The state is donated. ``batch`` holds int32 arrays ``tokens``, ``targets``,
    ``segment_ids`` and ``positions``, global ``[accumulation, B, S]``, per device
    ``[accumulation, B / (dp · fsdp), S]``. Metrics are f32 scalars: ``loss`` in nats
    per token, ``grad_norm`` before clipping, ``learning_rate``, ``tokens``; with
    experts also ``ROUTER_METRICS``, whose ``router_loss`` is trained beside the loss;
    with a loss scale also ``loss_scale``, whether its gradients overflowed
    (``overflow``), how many steps' did so far (``overflows``), and how many in a row
    did with the smallest scale (``stalled_overflows``).

    Where ``loss`` or ``grad_norm`` is not finite nothing is learned: but for a loss
    scale the new state is the old one. Both are sums over all devices, so that all of
    them decide alike.

    Args:
      config: What the step is made of.
      state: A state or its shapes, for the layouts.
    """
    norm_of = config.fixed_order.norm if config.fixed_order else global_norm

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Tree]:
        batch = _arranged(config, batch)
        counted = (batch["targets"] != IGNORED).sum(dtype=jnp.float32)
        # A batch of padding alone has no gradient, and none is invented for it.
        tokens = jnp.maximum(counted, 1.0)
        # It is the mean loss that is scaled: the gradients of a sum would overflow with
        # the size of the batch.
        scale = None if state.loss_scale is None else state.loss_scale.value / tokens
        share = 1.0 / _scaled(tokens, scale)
        sums, gradients, residual = _mean_gradients(config, state, batch, scale, share)
        if config.fixed_order is None:
            gradients = config.zero.hold_shares(gradients)
        metrics = {
            **jax.tree.map(share.__mul__, sums),
            "grad_norm": norm_of(gradients),
            "learning_rate": config.learning_rate(state.step),
            "tokens": counted,
        }
        if config.offload_optimizer:
            state = replace(state, optimizer=fetched(state.optimizer))
        finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"])
        new = _updated(config, state, gradients, residual, finite, metrics["grad_norm"])
        if state.loss_scale is not None:
            scale = state.loss_scale.adjust(finite)
            metrics |= _scale_metrics(state.loss_scale, scale, finite)
            new = replace(new, loss_scale=scale)
        if config.offload_optimizer:
            new = replace(new, optimizer=stored(new.optimizer))
        return new, metrics

    train_step.__name__ = "train_step"
    specs = state_specs(
        config.model,
        config.optimizer,
        config.mesh,
        loss_scale=state.loss_scale,
        zero_stage=config.zero_stage,
    )
    specs = replace(specs, residual=config.exchange.residual_specs)
    return function(
        train_step,
        mesh=config.mesh,
        in_specs={"state": specs, "batch": batch_spec(config)},
        out_specs=(specs, PartitionSpec()),
        donate=("state",),
    )


def make_eval_step(config: StepConfig) -> Function:
    """Compile-ready function ``(params, batch) -> (summed loss, tokens)``.

    ``batch`` is that of one microbatch: ``[B, S]`` arrays. The loss is in nats.
    """

    def eval_step(
        params: Tree, batch: Batch
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        batch = _arranged(config, batch)
        tokens = (batch["targets"] != IGNORED).sum(dtype=jnp.float32)
        if config.pipeline is not None:
            return config.pipeline.loss(params, batch), tokens
        if config.fixed_order is not None:
            rows = {name: array[None] for name, array in batch.items()}

            def loss(params: Tree, rows: Batch) -> Float[Array, ""]:
                return _losses(config, params, rows, NO_MESH)[1]["loss"]

            return config.fixed_order.summed(loss, params, rows), tokens
        place = config.model.place(config.mesh)
        return _losses(config, params, batch, place)[1]["loss"], tokens

    return function(
        eval_step,
        mesh=config.mesh,
        in_specs={
            "params": config.zero.params,
            "batch": PartitionSpec(config.data_axes or None),
        },
        out_specs=PartitionSpec(),
    )


def _arranged(config: StepConfig, batch: Batch) -> Batch:
    """A batch in the order in which the devices of ``cp`` hold its sequences.

    They are given whole sequences, 16 bytes a token, so that each takes its own tokens,
    in whatever order, without a word to the others.
    """
    place = config.model.place(config.mesh)
    return {name: place.arranged(array) for name, array in batch.items()}


def batch_spec(config: StepConfig) -> PartitionSpec:
    """Layout of a step's batch: whole over microbatches, split over the data axes."""
    return PartitionSpec(None, config.data_axes or None)


def _losses(
    config: StepConfig, params: Tree, batch: Batch, place: Placement
) -> tuple[Float[Array, ""], Sums]:
    """What one microbatch trains, in nats summed over tokens, and what it shows.

    The routers' losses are of one microbatch: each counts with the microbatch's share
    of the tokens.
    """
    with autocast(config.dtype) if config.dtype != "f32" else nullcontext():
        module = config.model.module(params)
        hidden, statistics = module.hidden(
            batch["tokens"],
            positions=batch["positions"],
            segment_ids=batch["segment_ids"],
            place=place,
        )
        loss = module.loss(
            hidden,
            batch["targets"],
            ignore_index=IGNORED,
            chunk=config.loss_chunk,
            place=place,
        )
    tokens = (batch["targets"] != IGNORED).sum(dtype=jnp.float32)
    routers = router_sums(config.model.config, statistics, tokens)
    return loss + routers.get("router_loss", 0.0), {"loss": loss, **routers}


def _no_sums(config: StepConfig) -> Sums:
    routers = ROUTER_METRICS if config.model.config.num_experts else ()
    return dict.fromkeys(("loss", *routers), jnp.float32(0.0))


def _mean_gradients(
    config: StepConfig,
    state: TrainState,
    batch: Batch,
    scale: Float[Array, ""] | None,
    share: Float[Array, ""],
) -> tuple[Sums, Tree, Tree]:
    """Sums times ``scale``; mean gradients; and what devices keep of them."""
    if not config.exchange.is_active:
        sums, gradients = _summed_gradients(config, state.params, batch, scale)
        return sums, jax.tree.map(share.__mul__, gradients), state.residual
    sums, own = _gradients_of_copies(config, (AXIS,), state.params, batch, scale)
    own = jax.tree.map(share.__mul__, own)
    return sums, *config.exchange.summed(own, state.residual)


def _summed_gradients(
    config: StepConfig, params: Tree, batch: Batch, scale: Float[Array, ""] | None
) -> tuple[Sums, Tree]:
    """Sums and gradients over all microbatches, both times any ``scale``."""
    if config.pipeline is not None:
        seed = _scaled(jnp.float32(1.0), scale)
        sums, gradients = config.pipeline.gradients(params, batch, seed)
        return _scaled(sums, scale), gradients
    if config.fixed_order is not None:
        return _summed_in_order(config, config.fixed_order, params, batch, scale)
    if config.sync_every > 1 and config.mesh.axis_size(config.data_axes) > 1:
        return _summed_in_groups(config, params, batch, scale)
    place = config.model.place(config.mesh)
    config.zero.declare_gradients(params)

    def one(micro: Batch) -> tuple[Sums, Tree]:
        loss, sums = _scaled(_losses(config, params, micro, place), scale)
        return sums, grad(loss, params)

    zeros = _no_sums(config), config.zero.hold_gradients(_zeros(params))
    return _accumulated(one, zeros, batch)


def _summed_in_groups(
    config: StepConfig, params: Tree, batch: Batch, scale: Float[Array, ""] | None
) -> tuple[Sums, Tree]:
    """The same, reduced over the data axes once for ``sync_every`` microbatches."""

    def group(micros: Batch) -> tuple[Sums, Tree]:
        axes = config.data_axes
        sums, own = _gradients_of_copies(config, axes, params, micros, scale)
        return sums, jax.tree.map(_sum_of_copies, own)

    groups = config.accumulation // config.sync_every
    zeros = _no_sums(config), _zeros(params)
    return _accumulated(group, zeros, _reshaped(batch, 0, groups))


def _summed_in_order(
    config: StepConfig,
    order: FixedOrder,
    params: Tree,
    batch: Batch,
    scale: Float[Array, ""] | None,
) -> tuple[Sums, Tree]:
    """The same, every sum in the order that is the same on all meshes."""
    scale = jnp.float32(1.0) if scale is None else scale

    def losses(
        params: Tree, scale: Float[Array, ""], micro: Batch
    ) -> tuple[Float[Array, ""], Sums]:
        return _scaled(_losses(config, params, micro, NO_MESH), scale)

    differentiated = jax.value_and_grad(losses, has_aux=True)

    def one(inputs: Tree, micro: Batch) -> tuple[Sums, Tree]:
        (_, sums), gradients = differentiated(*inputs, micro)
        return sums, gradients

    return order.summed(one, (params, scale), batch)


def _gradients_of_copies(
    config: StepConfig,
    axes: tuple[str, ...],
    params: Tree,
    batch: Batch,
    scale: Float[Array, ""] | None,
) -> tuple[Sums, Tree]:
    """The same with the gradients not reduced over some of the data axes.

    Weights are copied along a leading dim, one copy for each device along the axes, so
    that the gradient of a copy is that device's own, not reduced, and can be summed
    over microbatches where it is.
    """
    copies = config.mesh.axis_size(axes)
    local = replace(config.model.place(config.mesh), taken=frozenset(axes))

    def losses(own: Tree, micro: Batch) -> tuple[Float[Array, ""], Sums]:
        return _losses(config, own, micro, local)

    losses_of_copies = jax.vmap(losses, spmd_axis_name=axes)
    own = _copied(config, params, axes)

    def one(micro: Batch) -> tuple[Sums, Tree]:
        totals = jax.tree.map(jnp.sum, losses_of_copies(own, micro))
        loss, sums = _scaled(totals, scale)
        return sums, grad(loss, own)

    zeros = _no_sums(config), _zeros(own)
    return _accumulated(one, zeros, _reshaped(batch, 1, copies))


def _scaled(values: Tree, scale: Float[Array, ""] | None) -> Tree:
    return values if scale is None else jax.tree.map(scale.__mul__, values)


def _accumulated(
    one: Callable[[Batch], tuple[Sums, Tree]], zeros: tuple[Sums, Tree], batch: Batch
) -> tuple[Sums, Tree]:
    """The sum of ``one`` over the leading dim of the batch, in a scan from zeros."""
    if next(iter(batch.values())).shape[0] == 1:
        return one({name: array[0] for name, array in batch.items()})

    def add(carry: Tree, micro: Batch) -> tuple[Tree, None]:
        return jax.tree.map(jnp.add, carry, one(micro)), None

    return jax.lax.scan(add, zeros, dict(batch))[0]


def _zeros(weights: Tree) -> Tree:
    return jax.tree.map(jnp.zeros_like, weights)


def _copied(config: StepConfig, params: Tree, axes: tuple[str, ...]) -> Tree:
    """One copy of every weight for each device along some axes, on that device."""
    copies = config.mesh.axis_size(axes)

    def copy(weight: Array, spec: PartitionSpec) -> Array:
        inner = [None if entry in axes else entry for entry in spec]
        copied = jnp.broadcast_to(weight[None], (copies, *weight.shape))
        return constrain(copied, config.mesh, PartitionSpec(axes, *inner))

    return jax.tree.map(copy, params, config.model.layouts(config.mesh))


def _reshaped(batch: Batch, dim: int, parts: int) -> Batch:
    """The batch with one dim folded into ``parts`` rows."""
    return {
        name: array.reshape(*array.shape[:dim], parts, -1, *array.shape[dim + 1 :])
        for name, array in batch.items()
    }


def _sum_of_copies(gradient: Array) -> Array:
    return gradient.sum(axis=0)


def _updated(
    config: StepConfig,
    state: TrainState,
    gradients: Tree,
    residual: Tree | None,
    finite: Bool[Array, ""],
    norm: Float[Array, ""],
) -> TrainState:
    """The state after the step; the one before, where the step is not finite.

    A choice of each element, and not a branch: it becomes part of the loop that
    computes the element and has read the old one, and arrays stay where they are.
    """
    shares = config.zero.hold_shares(state.params)
    update = optax.with_extra_args_support(config.optimizer).update
    if config.fixed_order is not None:
        specs = state_specs(
            config.model, config.optimizer, config.mesh, zero_stage=config.zero_stage
        )
        layouts = config.zero.optimizer_state
        update = config.fixed_order.by_element(update, layouts, specs.optimizer)
    updates, optimizer = update(gradients, state.optimizer, shares, norm=norm)
    params = optax.apply_updates(shares, config.zero.hold_shares(updates))
    old = replace(state, params=shares)
    new = TrainState(state.step + 1, params, optimizer, state.loss_scale, residual)
    return jax.tree.map(partial(jnp.where, finite), new, old)


def _scale_metrics(used: LossScale, scale: LossScale, finite: Bool[Array, ""]) -> Tree:
    return {
        "loss_scale": used.value,
        "overflow": 1.0 - finite.astype(jnp.float32),
        "overflows": scale.overflows.astype(jnp.float32),
        "stalled_overflows": scale.stalled.astype(jnp.float32),
    }
