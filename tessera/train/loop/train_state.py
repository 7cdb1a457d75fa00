# SPDX-License-Identifier: Apache-2.0
"""``TrainState``: parameters, optimizer state and step, with layouts on the mesh."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from tessera.foundations.tree import Tree
from tessera.mesh import Mesh
from tessera.ops.loss_scale import LossScale
from tessera.train.loop import optimizer_offload
from tessera.train.loop.spikes import SpikeWindow
from tessera.train.loop.zero_stages import Zero
from tessera.train.models.model import Model


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["step", "params", "optimizer", "loss_scale", "spikes", "reference"],
    meta_fields=[],
)
@dataclass(frozen=True)
class TrainState:
    """Everything that a step reads and replaces.

    Attributes:
      step: Steps done so far, int32 scalar (its shape or spec in the trees of those).
      params: The model's parameters, f32.
      optimizer: The state of the Optax transformation.
      loss_scale: The dynamic loss scale of fp16, or None.
      spikes: Numbers of the last steps, which new ones are compared with, or None.
      reference: The parameters that the run began with, where what is learned is
        compared with them, or None.
    """

    step: Any
    params: Tree
    optimizer: Tree
    loss_scale: LossScale | None = None
    spikes: SpikeWindow | None = None
    reference: Tree | None = None


def init_state(
    model: Model,
    optimizer: optax.GradientTransformation,
    key: jax.Array,
    mesh: Mesh,
    *,
    params: Tree | None = None,
    zero_stage: int = 0,
    offload_optimizer: bool = False,
    keeps_reference: bool = False,
) -> TrainState:
    """A fresh state, every shard of it created on its own device.

    Args:
      model: Whose parameters.
      optimizer: Whose state.
      key: The same key gives the same numbers on every mesh.
      mesh: Where it lies.
      params: Its parameters in their layouts; None initializes them.
      zero_stage: What is split over ``dp``; see ``Zero``.
      offload_optimizer: Whether the optimizer's state lies in the memory of the host.
      keeps_reference: Whether the state has a second copy of the parameters.

    Raises:
      AbstractMeshError: [T105] this machine lacks some of the mesh's devices.
    """
    specs = state_specs(model, optimizer, mesh, zero_stage=zero_stage)
    if params is None:
        params = model.init(key, mesh, layouts=specs.params)
    shapes = jax.eval_shape(optimizer.init, model.trained(params))
    moments_at = optimizer_offload.shardings(
        mesh.jax, specs.optimizer, shapes, on_host=offload_optimizer
    )

    def others(params: Tree) -> tuple[jax.Array, Tree]:
        return jnp.int32(0), optimizer.init(model.trained(params))

    layouts = (NamedSharding(mesh.jax, specs.step), moments_at)
    step, moments = jax.jit(others, out_shardings=layouts)(params)
    reference = jax.tree.map(jnp.copy, params) if keeps_reference else None
    return TrainState(step, params, moments, reference=reference)


def abstract_state(
    model: Model,
    optimizer: optax.GradientTransformation,
    *,
    loss_scale: LossScale | None = None,
) -> TrainState:
    """Shapes and dtypes of a state; nothing is allocated."""
    params = model.abstract()
    return TrainState(
        step=jax.ShapeDtypeStruct((), jnp.int32),
        params=params,
        optimizer=jax.eval_shape(optimizer.init, model.trained(params)),
        loss_scale=jax.eval_shape(lambda: loss_scale),
    )


def state_specs(
    model: Model,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    loss_scale: LossScale | None = None,
    zero_stage: int = 0,
) -> TrainState:
    """The layout of every leaf of a state.

    A leaf of the optimizer that has the path and the shape of a parameter, such as
    Adam's moments, is laid out like it, or with a ``zero_stage`` split further over
    ``dp``; counters and factored moments are replicated, or split over ``dp`` alone.
    """
    shapes = abstract_state(model, optimizer, loss_scale=loss_scale)
    zero = Zero(model, mesh, zero_stage)
    layouts = {
        path: (leaf.shape, spec)
        for (path, leaf), spec in zip(
            jax.tree_util.tree_leaves_with_path(model.trained(shapes.params)),
            jax.tree.leaves(zero.optimizer_state),
            strict=True,
        )
    }

    def like_parameter(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
        for start in range(len(path)):
            shape, spec = layouts.get(path[start:], (None, None))
            if spec is not None and shape == leaf.shape:
                return spec
        return zero.split(PartitionSpec(), leaf.shape)

    return TrainState(
        step=PartitionSpec(),
        params=zero.params,
        optimizer=jax.tree_util.tree_map_with_path(like_parameter, shapes.optimizer),
        loss_scale=jax.tree.map(replicated, shapes.loss_scale),
    )


def replicated(_: Any) -> PartitionSpec:
    """The layout of an array of which every device has all."""
    return PartitionSpec()
