# SPDX-License-Identifier: Apache-2.0
"""The trainer's step written with JAX and Optax alone, which Tessera's is held against.

Both take the state and the batch of the trainer, in the same layouts, and use the same
model and optimizer. ``sharded`` is ``jax.jit`` with ``NamedSharding``; ``gpipe`` is a
``shard_map`` over ``pp`` with a ``lax.scan`` over ticks that JAX differentiates.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tessera.jax_compat.workarounds import correct_options
from tessera.ops.clipping import global_norm
from tessera.train.config.step_config import StepConfig, batch_spec
from tessera.train.loop.train_state import TrainState, state_specs
from tessera.train.models.model import Model
from tessera.train.models.partition_rules import NO_MESH

Tree: TypeAlias = Any
Loss: TypeAlias = Callable[[Tree, Tree], jax.Array]


def sharded(config: StepConfig) -> Callable[..., Any]:
    """The step on a mesh of ``dp``, ``fsdp`` and ``tp``, for one microbatch."""
    place = config.model.place(config.mesh)

    def summed_loss(params: Tree, batch: Tree) -> jax.Array:
        micro = {name: array[0] for name, array in batch.items()}
        logits = config.model.logits(params, micro, place)
        return cross_entropy(logits, micro["targets"])

    return step_of(config, summed_loss)


def gpipe(config: StepConfig) -> Callable[..., Any]:
    """The step on a mesh of ``pp`` alone, for the config's microbatches.

    The backward of the scan is the pipeline in reverse. Each tick keeps the stage's
    input and runs the stage anew; a device with nothing to do skips it.
    """
    stages, micros = config.mesh.shape["pp"], config.accumulation
    ring = [(device, (device + 1) % stages) for device in range(stages)]

    def own_losses(layers: Tree, shared: Tree, batch: Tree) -> jax.Array:
        stage = jax.lax.axis_index("pp")
        layers = jax.tree.map(lambda array: array[0, 0], layers)
        params = {**shared, "decoder": layers}
        rows, length = batch["tokens"].shape[1:]
        empty = jnp.zeros((rows, length, config.model.config.d_model))

        @jax.checkpoint
        def work(x: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
            return jax.lax.cond(
                (number >= 0) & (number < micros),
                lambda: _stage(
                    config.model, params, x, _micro(batch, number), stage, stages
                ),
                lambda: (empty, jnp.float32(0.0)),
            )

        def tick(x: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
            x, loss = work(x, number - stage)
            return jax.lax.ppermute(x, "pp", ring), loss

        losses = jax.lax.scan(tick, empty, jnp.arange(micros + stages - 1))[1]
        return jax.lax.psum(losses.sum(), "pp")

    def summed_loss(params: Tree, batch: Tree) -> jax.Array:
        shared = {name: part for name, part in params.items() if name != "decoder"}
        pipelined = jax.shard_map(
            own_losses,
            mesh=config.mesh.jax,
            in_specs=(P(None, "pp"), P(), P()),
            out_specs=P(),
            check_vma=False,
        )
        return pipelined(params["decoder"], shared, batch)

    return step_of(config, summed_loss)


def _micro(batch: Tree, number: jax.Array) -> Tree:
    return jax.tree.map(
        lambda array: jax.lax.dynamic_index_in_dim(array, number, keepdims=False), batch
    )


def _stage(
    model: Model,
    params: Tree,
    x: jax.Array,
    micro: Tree,
    stage: jax.Array,
    stages: int,
) -> tuple[jax.Array, jax.Array]:
    """One stage on one microbatch: what it hands on, and its part of the loss."""
    layers = model.config.num_layers // stages
    x = jax.lax.cond(stage == 0, lambda: model.embed(params, micro, NO_MESH), lambda: x)
    numbers = stage * layers + jnp.arange(layers)
    x, _ = model.run_blocks(params, x, micro, NO_MESH, numbers)
    loss = jax.lax.cond(
        stage == stages - 1,
        lambda: cross_entropy(model.head(params, x, micro, NO_MESH), micro["targets"]),
        lambda: jnp.float32(0.0),
    )
    return x, loss


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The loss summed over the tokens that count, without a gather over the words."""
    logits = logits - jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True))
    total = jnp.log(jnp.exp(logits).sum(axis=-1))
    words = jax.lax.broadcasted_iota(labels.dtype, logits.shape, 2)
    chosen = jnp.where(words == labels[..., None], logits, 0.0).sum(-1)
    legal = (labels >= 0) & (labels < logits.shape[-1])
    losses = jnp.where(legal, total - chosen, jnp.nan)
    return jnp.where(labels != -100, losses, 0.0).sum()


def step_of(config: StepConfig, summed_loss: Loss) -> Callable[..., Any]:
    """The step around a loss: gradients, their mean over tokens, the update."""
    specs = state_specs(config.model, config.optimizer, config.mesh)
    named = partial(NamedSharding, config.mesh.jax)

    def train_step(state: TrainState, batch: Tree) -> tuple[TrainState, Tree]:
        loss, gradients = jax.value_and_grad(summed_loss)(state.params, batch)
        layouts = jax.tree.map(named, specs.params)
        gradients = jax.lax.with_sharding_constraint(gradients, layouts)
        tokens = (batch["targets"] != -100).sum(dtype=jnp.float32)
        share = 1.0 / jnp.maximum(tokens, 1.0)
        gradients = jax.tree.map(lambda g: share * g, gradients)
        norm = global_norm(gradients)
        update = optax.with_extra_args_support(config.optimizer).update
        updates, optimizer = update(gradients, state.optimizer, state.params, norm=norm)
        metrics = {
            "loss": share * loss,
            "grad_norm": norm,
            "learning_rate": config.learning_rate(state.step),
            "tokens": tokens,
        }
        params = optax.apply_updates(state.params, updates)
        new = TrainState(state.step + 1, params, optimizer)
        # As Tessera's step: nothing is learned from what is not finite.
        finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(norm)
        return jax.tree.map(partial(jnp.where, finite), new, state), metrics

    states = jax.tree.map(named, specs)
    return jax.jit(
        train_step,
        in_shardings=(states, named(batch_spec(config))),
        out_shardings=(states, named(P())),
        donate_argnums=0,
        # As Tessera's steps: without them JAX 0.10 computes wrong values on CPUs.
        compiler_options=correct_options(jax.default_backend()) or None,
    )
