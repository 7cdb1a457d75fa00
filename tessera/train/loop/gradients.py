# SPDX-License-Identifier: Apache-2.0
"""The gradients of a step's microbatches, as a composition of transforms.

The innermost function takes the gradient of one microbatch; the others add microbatches
up or delay the reduction over mesh axes:

- plain: ``accumulate(microbatch)``
- ``sync_every``: ``accumulate(reduce(accumulate(unreduced microbatch)))``
- ``reduction_parts``: ``fixed_order.summed(part)``
- a pipeline differentiates and accumulates all microbatches by itself.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from tessera.foundations.tree import Tree
from tessera.graph.gradient_primitive import gradients_of
from tessera.tracing.scope import constrain
from tessera.train.config.step_config import StepConfig
from tessera.train.loop.deterministic_numerics import FixedOrder
from tessera.train.models.model import Batch, Sums

# A factor of the loss against underflow in fp16; None is 1.
Scale: TypeAlias = Float[Array, ""] | None
# From a batch to the sums and the gradients of its microbatches.
Differentiated: TypeAlias = Callable[[Batch], tuple[Sums, Tree]]


def mean_gradients(
    config: StepConfig,
    params: Tree,
    batch: Batch,
    scale: Scale,
    share: Float[Array, ""],
) -> tuple[Sums, Tree]:
    """Sums and mean gradients over all microbatches.

    Args:
      config: The step.
      params: Parameters.
      batch: ``[accumulation, B, S]`` arrays.
      scale: Multiplies the losses.
      share: Multiplies the gradients: 1 over the count of the batch and ``scale``.

    Returns:
      The sums times ``scale``, and the gradients.
    """
    if config.pipeline is not None:
        seed = jnp.float32(1.0) if scale is None else scale
        sums, gradients = config.pipeline.gradients(params, batch, seed)
        gradients = config.model.trained(gradients)
        sums = _scaled(sums, scale)
    elif config.fixed_order is not None:
        sums, gradients = _in_fixed_order(
            config, config.fixed_order, params, batch, scale
        )
    elif config.sync_every > 1 and config.mesh.axis_size(config.data_axes) > 1:
        sums, gradients = _reduced_seldom(config, params, batch, scale)
    else:
        config.zero.declare_gradients(params)
        sums, gradients = _microbatches(config, params, batch, scale)
    return sums, jax.tree.map(share.__mul__, gradients)


def _microbatches(
    config: StepConfig,
    params: Tree,
    batch: Batch,
    scale: Scale,
    *,
    unreduced: tuple[str, ...] = (),
) -> tuple[Sums, Tree]:
    """Sums and gradients over microbatches, not reduced over some of the data axes.

    Where there are such axes, weights are copied along a leading dim, one copy for each
    device along them: the gradient of a copy is that device's own and is summed over
    microbatches without communication.
    """
    place, weights = config.model.place(config.mesh), config.model.trained(params)
    if unreduced:
        place = replace(place, vmapped_axes=frozenset(unreduced))
        weights = _copied(config, weights, unreduced)
        batch = _reshaped(batch, 1, config.mesh.axis_size(unreduced))

    def microbatch(weights: Tree, micro: Batch) -> tuple[Float[Array, ""], Sums]:
        if config.reduces_narrow:
            weights = _narrowed(config, weights)
        whole = config.model.with_frozen(weights, params)
        chunk = config.loss_chunk
        return config.objective.loss(config.model, whole, micro, place, chunk)

    def one(micro: Batch) -> tuple[Sums, Tree]:
        if unreduced:
            of_copies = jax.vmap(microbatch, spmd_axis_name=unreduced)
            totals = jax.tree.map(jnp.sum, of_copies(weights, micro))
        else:
            totals = microbatch(weights, micro)
        loss, sums = _scaled(totals, scale)
        return sums, gradients_of(loss, weights)

    zeros = jax.tree.map(jnp.zeros_like, weights)
    if not unreduced:
        zeros = config.zero.constrain_gradients(zeros)
    return _accumulate(config, one, zeros, batch)


def _reduced_seldom(
    config: StepConfig, params: Tree, batch: Batch, scale: Scale
) -> tuple[Sums, Tree]:
    """Gradients reduced over the data axes once for ``sync_every`` microbatches."""
    axes = config.data_axes

    def group(micros: Batch) -> tuple[Sums, Tree]:
        sums, own = _microbatches(config, params, micros, scale, unreduced=axes)
        return sums, jax.tree.map(partial(jnp.sum, axis=0), own)

    groups = _reshaped(batch, 0, config.accumulation // config.sync_every)
    zeros = jax.tree.map(jnp.zeros_like, config.model.trained(params))
    return _accumulate(config, group, zeros, groups)


def _in_fixed_order(
    config: StepConfig, order: FixedOrder, params: Tree, batch: Batch, scale: Scale
) -> tuple[Sums, Tree]:
    """Gradients whose sums have the same order on all meshes."""
    scale = jnp.float32(1.0) if scale is None else scale
    model = config.model.without_stages()

    def scaled(
        weights: Tree, params: Tree, scale: Float[Array, ""], micro: Batch
    ) -> tuple[Float[Array, ""], Sums]:
        whole = model.with_frozen(weights, params)
        place, chunk = model.place(None), config.loss_chunk
        loss = config.objective.loss(model, whole, micro, place, chunk)
        return _scaled(loss, scale)

    # Inside a region of one device each, where no layouts are declared for gradients.
    differentiated = jax.value_and_grad(scaled, has_aux=True)

    def one(params: Tree, micro: Batch, scale: Float[Array, ""]) -> tuple[Sums, Tree]:
        weights = model.trained(params)
        (_, sums), gradients = differentiated(weights, params, scale, micro)
        return sums, gradients

    sums, gradients = order.summed(one, params, batch, scale)
    return sums, config.model.stored(gradients)


def _accumulate(
    config: StepConfig, one: Differentiated, zeros: Tree, batch: Batch
) -> tuple[Sums, Tree]:
    """The sum of ``one`` over the leading dim of the batch, in a scan from zeros."""
    if next(iter(batch.values())).shape[0] == 1:
        return one({name: array[0] for name, array in batch.items()})

    def add(carry: Tree, micro: Batch) -> tuple[Tree, None]:
        return jax.tree.map(jnp.add, carry, one(micro)), None

    names = config.objective.all_sum_names(config.model)
    sums = dict.fromkeys(names, jnp.float32(0.0))
    return jax.lax.scan(add, (sums, zeros), dict(batch))[0]


def _scaled(values: Tree, scale: Scale) -> Tree:
    return values if scale is None else jax.tree.map(scale.__mul__, values)


def _copied(config: StepConfig, params: Tree, axes: tuple[str, ...]) -> Tree:
    """One copy of every weight for each device along some axes, on that device."""
    copies = config.mesh.axis_size(axes)

    def copy(weight: Array, spec: PartitionSpec) -> Array:
        inner = [None if entry in axes else entry for entry in spec]
        copied = jnp.broadcast_to(weight[None], (copies, *weight.shape))
        return constrain(copied, config.mesh, PartitionSpec(axes, *inner))

    layouts = config.model.trained(config.model.layouts(config.mesh))
    return jax.tree.map(copy, params, layouts)


def _narrowed(config: StepConfig, weights: Tree) -> Tree:
    """The weights in the dtype of activations, which their gradients then have, too."""

    def cast(weight: Array, spec: PartitionSpec) -> Array:
        return constrain(weight.astype(config.model.dtype), config.mesh, spec)

    layouts = config.model.trained(config.zero.params)
    return jax.tree.map(cast, weights, layouts)


def _reshaped(batch: Batch, dim: int, parts: int) -> Batch:
    """The batch with one dim folded into ``parts`` rows."""
    return {
        name: array.reshape(*array.shape[:dim], parts, -1, *array.shape[dim + 1 :])
        for name, array in batch.items()
    }
