# SPDX-License-Identifier: Apache-2.0
"""Computes the gradients of a trainer's model that is split into pipeline stages.

The microbatches of the step are those of the pipeline. The first stage looks up the
embeddings, the last computes the logits and the loss; both read the embedding table,
which is sharded over ``pp`` and gathered once in a step.

The loop is that of ``graph.pipeline`` (``schedule_loop.py``). Unlike a user's stages,
these are one program for all: their layers are stored stacked, by stage, so no weight
is moved at the beginning of a step, and no branch is compiled for each stage.
"""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from tessera.compiler.pipelining.device_tick import Stages
from tessera.compiler.pipelining.named_schedules import schedule
from tessera.compiler.pipelining.schedule_loop import Pipeline
from tessera.compiler.pipelining.schedule_table import Schedule
from tessera.labels import IGNORE_INDEX
from tessera.mesh import Mesh
from tessera.models.decoder.config import DecoderConfig
from tessera.models.decoder.decoder import RESIDUAL, Decoder
from tessera.models.decoder.model import DecoderModel
from tessera.models.decoder.pipeline_stages import StageSplit
from tessera.models.partition_rules import Placement
from tessera.scope import autocast, constrain
from tessera.shard_spec import axes_of_dims
from tessera.training.router_metrics import router_sums
from tessera.tree import Tree


@dataclass(frozen=True)
class PipelinedModel:
    """A model that is split into stages, and their schedule.

    Attributes:
      model: The model; it has a ``split``.
      mesh: A mesh with an axis ``pp``.
      schedule: The schedule, for as many microbatches as a step has.
      dtype: Dtype of matmuls.
      gradient_layouts: Layouts of gradients; None for those of their parameters.
      loss_chunk: The number of tokens whose logits the last stage computes at a time.
    """

    model: DecoderModel
    mesh: Mesh
    schedule: Schedule
    dtype: str = "f32"
    gradient_layouts: Tree | None = None
    loss_chunk: int | str = "none"

    def gradients(
        self, params: Tree, batch: Tree, seed: Float[Array, ""]
    ) -> tuple[dict[str, Float[Array, ""]], Tree]:
        """Summed losses in nats, and gradients of ``seed`` times what is trained.

        Args:
          params: As from ``model.init``.
          batch: Arrays ``[M, B, S]``, replicated over ``pp``.
          seed: Scale of the gradients.
        """
        weights, shared = _split_params(params)
        result = self._pipeline(batch).gradients(weights, shared, batch, seed)
        sums = {"loss": _without_router_loss(result.loss, result.statistics)}
        gradients = {**result.shared, "decoder": result.weights}
        return {**sums, **result.statistics}, gradients

    def loss(self, params: Tree, batch: Tree) -> Float[Array, ""]:
        """Summed loss in nats of one microbatch ``[B, S]``, without gradients."""
        batch = jax.tree.map(partial(jnp.expand_dims, axis=0), batch)
        _, loss, routers = self._pipeline(batch).outputs(*_split_params(params), batch)
        return _without_router_loss(loss, routers)

    def _pipeline(self, batch: Tree) -> Pipeline:
        stages = self._stages(batch)
        return Pipeline(self.schedule, stages, self.mesh, "pp", self._data_axes)

    @property
    def _data_axes(self) -> tuple[str, ...]:
        """Axes over which gradients are summed once in a step, not in every tick.

        None where gradients are sharded over ``dp`` (ZeRO), or with experts, whose
        balance loss is over the tokens of all devices.
        """
        specs = jax.tree.leaves(self._layouts)
        is_sharded = any(
            "dp" in axes for spec in specs for axes in axes_of_dims(spec, 0)
        )
        has_no_dp = self.mesh.shape.get("dp", 1) == 1
        if has_no_dp or is_sharded or self.model.config.num_experts:
            return ()
        return ("dp",)

    @property
    def _layouts(self) -> Tree:
        if self.gradient_layouts is not None:
            return self.gradient_layouts
        return self.model.layouts(self.mesh)

    @property
    def _place(self) -> Placement:
        """The layout of a stage's activations in the SPMD region."""
        place = self.model.place(self.mesh)
        return replace(place, vmapped_axes=place.vmapped_axes | set(self._data_axes))

    def _stages(self, batch: Tree) -> Stages:
        place, layouts = self._place, self._layouts
        width = self.model.config.d_model
        _, rows, length = batch["tokens"].shape
        rows //= self.mesh.axis_size(self._data_axes)

        def constrain_weights(weights: Tree) -> Tree:
            return jax.tree.map(self._as_stored, weights, layouts["decoder"])

        return Stages(
            runs=[self._run],
            wire=jax.ShapeDtypeStruct((rows, length, width), jnp.float32),
            constrain_wire=lambda wire: place.constrain(wire, *RESIDUAL),
            constrain_weights=constrain_weights,
        )

    def _as_stored(self, gradient: Array, layout: PartitionSpec) -> Array:
        """A virtual stage's gradient in the layout of the stacked gradients."""
        return constrain(gradient, self.mesh, PartitionSpec(*layout[2:]))

    def _run(
        self, weights: Tree, shared: Tree, wire: Array, micro: Tree, index: Array
    ) -> tuple[Array, Array, tuple[Tree, Tree]]:
        """One virtual stage on one microbatch."""
        place, split = self._place, self._split
        module = self.model.stage({**shared, "decoder": weights})
        numbers = split.numbers.reshape(-1, split.depth)
        with autocast(self.dtype) if self.dtype != "f32" else nullcontext():
            x_BSD = jax.lax.cond(
                index == 0,
                lambda: module.embed(micro["tokens"], place=place),
                lambda: wire,
            )
            x_BSD, statistics = module.decode(
                x_BSD,
                positions=micro["positions"],
                segment_ids=micro["segment_ids"],
                numbers=jax.lax.dynamic_index_in_dim(
                    jnp.asarray(numbers), index, 0, keepdims=False
                ),
                has_fillers=not split.is_even,
                place=place,
            )
            is_last = index == self.schedule.virtual_stages - 1
            loss = jax.lax.cond(
                is_last,
                lambda: self._loss(module, x_BSD, micro["targets"]),
                lambda: jnp.float32(0.0),
            )
        tokens = (micro["targets"] != IGNORE_INDEX).sum(dtype=jnp.float32)
        routers = router_sums(self.model.config, statistics, tokens)
        loss = loss + routers.get("router_loss", 0.0)
        return x_BSD, loss, ((), routers)

    def _loss(self, module: Decoder, x_BSD: Array, targets: Array) -> Float[Array, ""]:
        place = self._place
        return module.loss(
            module.normalized(x_BSD, place=place),
            targets,
            ignore_index=IGNORE_INDEX,
            chunk=self.loss_chunk,
            place=place,
        )

    @property
    def _split(self) -> StageSplit:
        assert self.model.split is not None, "the model of a pipeline has stages"
        return self.model.split


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


def split_of(mesh: Mesh, config: DecoderConfig, chunks: int) -> StageSplit | None:
    """The layers of each stage; None where the mesh has no ``pp``.

    Raises:
      PipelineSizeError: [T311] there are more virtual stages than layers.
    """
    if "pp" not in mesh.axes:
        return None
    return StageSplit.of(config, mesh.shape["pp"], chunks)


def _without_router_loss(loss: Array, routers: dict[str, Array]) -> Array:
    """The cross-entropy of a pipeline's loss, which includes the routers' loss."""
    return loss - routers.get("router_loss", 0.0)


def _split_params(params: Tree) -> tuple[Tree, Tree]:
    """The stages' own parameters, and those that several read."""
    shared = {name: part for name, part in params.items() if name != "decoder"}
    return params["decoder"], shared
