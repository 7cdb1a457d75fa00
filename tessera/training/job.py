# SPDX-License-Identifier: Apache-2.0
"""What settings stand for: the mesh, the model, the data, the step to run."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from tessera.graph.function import Function
from tessera.graph.stages import Compiled
from tessera.mesh import Mesh
from tessera.models.model import Model
from tessera.models.rules import Placement
from tessera.training.config import Settings
from tessera.training.data import Corpus, load
from tessera.training.loss_scale import LossScale
from tessera.training.optimizers import make_optimizer
from tessera.training.state import TrainState, abstract_state, state_specs
from tessera.training.step import Recipe, batch_spec, make_train_step

_DTYPES: Final = {"f32": "f32", "bf16": "bf16", "fp16": "f16"}
_BATCH: Final = ("tokens", "targets", "segment_ids", "positions")


@dataclass(frozen=True)
class Job:
    """A run before its first array.

    Attributes:
      settings: What was asked for.
      mesh: Where it runs; it may be abstract, which is enough for a dry run.
    """

    settings: Settings
    mesh: Mesh

    @cached_property
    def model(self) -> Model:
        """The model, without arrays."""
        model = self.settings.model
        return Model(model.config, sequence_parallel=model.sequence_parallel)

    @cached_property
    def recipe(self) -> Recipe:
        """What the step is made of."""
        training = self.settings.training
        optimizer, learning_rate = make_optimizer(
            self.settings.optimizer,
            steps=training.steps,
            clip_norm=training.clip_norm,
            world_size=Placement(self.mesh).size("batch"),
        )
        return Recipe(
            model=self.model,
            optimizer=optimizer,
            learning_rate=learning_rate,
            mesh=self.mesh,
            accumulation=training.gradient_accumulation_steps,
            sync_every=training.sync_gradients_every,
            dtype=_DTYPES[training.mixed_precision],
            zero_stage=training.zero_stage,
        )

    @cached_property
    def loss_scale(self) -> LossScale | None:
        """The loss scale to begin with; fp16 alone has one."""
        fp16 = self.settings.training.mixed_precision == "fp16"
        return LossScale.initial() if fp16 else None

    @cached_property
    def step(self) -> Function:
        """The training step: ``(state, batch) -> (state, metrics)``."""
        return make_train_step(self.recipe, self.abstract_state)

    @cached_property
    def compiled(self) -> Compiled:
        """The compiled step, which the first call of ``step`` finds."""
        return self.step.compile(self.abstract_state, self.abstract_batch)

    @cached_property
    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and layouts of the state; nothing is allocated."""
        shapes = abstract_state(
            self.model, self.recipe.optimizer, loss_scale=self.loss_scale
        )
        specs = state_specs(
            self.model,
            self.recipe.optimizer,
            self.mesh,
            loss_scale=self.loss_scale,
            zero_stage=self.recipe.zero_stage,
        )
        return jax.tree.map(self._struct, shapes, specs)

    @property
    def abstract_batch(self) -> dict[str, Any]:
        """Shapes, dtypes and layouts of one step's batch."""
        training = self.settings.training
        rows = self.settings.rows_per_microbatch(self.mesh)
        steps = training.gradient_accumulation_steps
        shape = jax.ShapeDtypeStruct((steps, rows, training.sequence_length), jnp.int32)
        return {name: self._struct(shape, batch_spec(self.recipe)) for name in _BATCH}

    def layout_notes(self) -> list[str]:
        """What a reader of the settings would not expect, one sentence each."""
        return [*self.model.layout_notes(self.mesh), *self.recipe.zero.notes()]

    def check(self) -> None:
        """Raise what does not fit before anything is compiled or written.

        Raises:
          HeadCountError: [T402] the heads cannot be divided over ``tp``.
          ShardDivisibilityError: [T201] a parameter cannot be split over its axes.
        """
        self.model.layouts(self.mesh)

    def load_data(self) -> Corpus:
        """Read and pack the data, and see that it makes batches.

        Raises:
          TesseraError: T601 to T605, as ``data.load`` says.
          EmptyDataError: [T602] there are fewer rows than one step takes.
          BatchSizeError: [T503] a batch cannot be divided over the processes.
        """
        training = self.settings.training
        corpus = load(
            self.settings.data,
            sequence_length=training.sequence_length,
            seed=training.seed,
            vocab_size=self.settings.model.config.vocab_size,
        )
        process = jax.process_index(), jax.process_count()
        # The loop would be told as well, but after the step was compiled.
        corpus.train(self.settings.rows_per_step(self.mesh), *process).close()
        corpus.validation(self.settings.rows_per_microbatch(self.mesh), *process)
        return corpus

    def _struct(self, shape: Any, spec: Any) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(self.mesh.compile_mesh, spec)
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
