# SPDX-License-Identifier: Apache-2.0
"""The trainer's step: a Tessera function like any user's.

One optimizer step over ``accumulation`` microbatches. Gradients are summed over tokens
and divided by their number at the end, so an accumulated step is the step of the full
batch, however many tokens of each microbatch count.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float

from tessera.foundations.tree import Tree
from tessera.graph.function import Function
from tessera.graph.jit import function
from tessera.ops.clipping import global_norm
from tessera.ops.loss_scale import LossScale
from tessera.train.config.step_config import StepConfig, batch_spec
from tessera.train.loop.gradients import mean_gradients
from tessera.train.loop.optimizer_offload import to_device, to_host
from tessera.train.loop.train_state import TrainState, replicated, state_specs
from tessera.train.models.model import Batch, Sums, num_targets
from tessera.train.objectives.objective import NEXT_TOKEN


def make_train_step(config: StepConfig, state: TrainState) -> Function:
    """Compile-ready function ``(state, batch) -> (state, metrics)``.

    The state is donated. ``batch`` holds int32 arrays ``tokens``, ``targets``,
    ``segment_ids`` and ``positions``, global ``[accumulation, B, S]``, per device
    ``[accumulation, B / (dp · fsdp), S]``, and the f32 ``arrays`` of the objective.
    Metrics are f32 scalars: ``loss`` (of the next token in nats per token),
    ``grad_norm`` before clipping, ``learning_rate``, ``tokens``; the other sums of the
    objective and of the model, as means (with experts ``ROUTER_METRICS``); with a
    loss scale also ``loss_scale``, whether its gradients overflowed
    (``overflow``), how many steps' did so far (``overflows``), and how many in a row
    did with the smallest scale (``stalled_overflows``); with ``config.spikes`` those of
    ``SpikeGuard.judge``.

    Where ``loss`` or ``grad_norm`` is not finite, or the step is a spike that is to be
    skipped, nothing is learned: but for a loss scale the new state is the old one. Both
    are sums over all devices, so that all of them decide alike.

    Args:
      config: What the step is made of.
      state: A state or its shapes, for the layouts.
    """
    norm_of = config.fixed_order.norm if config.fixed_order else global_norm

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Tree]:
        reference, state = state.reference, replace(state, reference=None)
        batch = config.objective.prepared(_arranged(config, batch))
        counted = config.objective.count(batch)
        # Counted twice, XLA would add up the tokens of all devices twice.
        tokens = counted if config.objective == NEXT_TOKEN else num_targets(batch)
        # A batch of padding alone has no gradient, and none is invented for it.
        count = jnp.maximum(counted, 1.0)
        # It is the mean loss that is scaled: the gradients of a sum would overflow with
        # the size of the batch.
        scale = None if state.loss_scale is None else state.loss_scale.value / count
        share = 1.0 / (count if scale is None else count * scale)
        sums, gradients = mean_gradients(config, state.params, batch, scale, share)
        if config.fixed_order is None:
            gradients = config.zero.constrain_shares(gradients)
        else:  # as they are, so that the norm need not gather them
            gradients = config.fixed_order.whole(gradients)
        metrics = {
            **jax.tree.map(share.__mul__, sums),
            "grad_norm": norm_of(gradients),
            "learning_rate": config.learning_rate(state.step),
            "tokens": tokens,
        }
        if config.offload_optimizer:
            state = replace(state, optimizer=to_device(state.optimizer))
        finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"])
        accepted, spikes, norm = finite, None, metrics["grad_norm"]
        if config.spikes is not None and state.spikes is not None:
            accepted, spikes, scores = config.spikes.judge(
                state.spikes, metrics["loss"], norm, finite
            )
            metrics |= scores
        new = _updated(config, state, gradients, accepted, norm)
        new = replace(new, spikes=spikes)
        if state.loss_scale is not None:
            scale = state.loss_scale.adjust(finite)
            metrics |= _scale_metrics(state.loss_scale, scale, finite)
            new = replace(new, loss_scale=scale)
        if config.offload_optimizer:
            new = replace(new, optimizer=to_host(new.optimizer))
        return replace(new, reference=reference), metrics

    train_step.__name__ = "train_step"
    specs = layouts_of_state(config, state.loss_scale)
    return function(
        train_step,
        mesh=config.mesh,
        in_specs={"state": specs, "batch": batch_spec(config)},
        out_specs=(specs, PartitionSpec()),
        donate=("state",),
    )


def layouts_of_state(config: StepConfig, loss_scale: LossScale | None) -> TrainState:
    """The layout of every leaf of a step's state."""
    specs = state_specs(
        config.model,
        config.optimizer,
        config.mesh,
        loss_scale=loss_scale,
        zero_stage=config.zero_stage,
    )
    window = None if config.spikes is None else config.spikes.abstract_window
    reference = config.zero.params if config.keeps_reference else None
    spikes = jax.tree.map(replicated, window)
    return replace(specs, spikes=spikes, reference=reference)


def make_eval_step(config: StepConfig) -> Function:
    """Compile-ready function ``(params, batch) -> (sums, count)``.

    ``batch`` is that of one microbatch: ``[B, S]`` arrays. The sums are those of the
    objective, by name, and are divided by the count.
    """
    objective, chunk = config.objective, config.loss_chunk

    def eval_step(params: Tree, batch: Batch) -> tuple[Sums, Float[Array, ""]]:
        batch = objective.prepared(_arranged(config, batch))
        if config.pipeline is not None:
            sums = config.pipeline.sums(params, batch)
        elif config.fixed_order is not None:
            rows = {name: array[None] for name, array in batch.items()}
            order = config.fixed_order.of_rows(batch["tokens"].shape[0])
            plain = config.model.without_stages()

            def of_rows(params: Tree, rows: Batch) -> Sums:
                return objective.loss(plain, params, rows, plain.place(None), chunk)[1]

            sums = order.summed(of_rows, params, rows)
        else:
            place = config.model.place(config.mesh)
            sums = objective.loss(config.model, params, batch, place, chunk)[1]
        return {n: sums[n] for n in objective.sum_names}, objective.count(batch)

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

    Every device of ``cp`` receives whole sequences, 16 bytes a token, and selects its
    own tokens, so the reordering needs no communication.
    """
    if config.fixed_order is not None:
        return batch
    place = config.model.place(config.mesh)
    return {name: place.arranged(array) for name, array in batch.items()}


def _updated(
    config: StepConfig,
    state: TrainState,
    gradients: Tree,
    accepted: Bool[Array, ""],
    norm: Float[Array, ""],
) -> TrainState:
    """The state after the step; the one before, where the step is not accepted.

    A choice of each element, and not a branch: it becomes part of the loop that
    computes the element and has read the old one, and arrays stay where they are.
    """
    model = config.model
    shares = config.zero.constrain_shares(model.trained(state.params))
    update = optax.with_extra_args_support(config.optimizer).update
    if config.fixed_order is not None:
        layouts, specs = config.zero.optimizer_state, layouts_of_state(config, None)
        update = config.fixed_order.by_element(update, layouts, specs.optimizer)
    updates, optimizer = update(gradients, state.optimizer, shares, norm=norm)
    updated = optax.apply_updates(shares, config.zero.constrain_shares(updates))
    old = replace(state, params=model.with_frozen(shares, state.params))
    params = model.with_frozen(updated, state.params)
    new = replace(old, step=state.step + 1, params=params, optimizer=optimizer)
    return jax.tree.map(partial(jnp.where, accepted), new, old)


def _scale_metrics(used: LossScale, scale: LossScale, finite: Bool[Array, ""]) -> Tree:
    return {
        "loss_scale": used.value,
        "overflow": 1.0 - finite.astype(jnp.float32),
        "overflows": scale.overflows.astype(jnp.float32),
        "stalled_overflows": scale.stalled.astype(jnp.float32),
    }
