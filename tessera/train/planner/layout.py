# SPDX-License-Identifier: Apache-2.0
"""``Layout``: what the planner chooses for a run, a mesh and the settings with it."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tessera.train.config.config import Config, data_parallel_groups


@dataclass(frozen=True, slots=True)
class Layout:
    """How a training step lies on the devices of a target.

    Attributes:
      mesh: Names and sizes of the mesh's axes, outermost first.
      micro_batch_size: Sequences of a data-parallel group that are computed at once.
      microbatches: Microbatches of a step in each group.
      remat: Which results the backward pass computes again, as in ``training.remat``.
      zero_stage: As ``training.zero_stage``.
      offload: Whether the optimizer's state is in the memory of the host.
      loss_chunk: As ``training.loss_chunk``.
      schedule: Of the pipeline, as ``training.pipeline_schedule``; None without ``pp``.
      chunks: Parts of the layers on each stage, as ``training.pipeline_chunks``.
      gather: When stages gather over ``fsdp``, as ``training.pipeline_gather``.
      sequence_parallel: As ``model.sequence_parallel``.
    """

    mesh: tuple[tuple[str, int], ...]
    micro_batch_size: int
    microbatches: int
    remat: Any = "none"
    zero_stage: int = 0
    offload: bool = False
    loss_chunk: int | str = "auto"
    schedule: str | None = None
    chunks: int = 1
    gather: str = "tick"
    sequence_parallel: bool = False

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the mesh's axes, by name."""
        return dict(self.mesh)

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return math.prod(size for _, size in self.mesh)

    @property
    def global_batch_size(self) -> int:
        """Sequences of a step."""
        groups = data_parallel_groups(self.sizes)
        return groups * self.micro_batch_size * self.microbatches

    def applied(self, config: Config) -> Config:
        """A configuration with this layout in it."""
        sizes = tuple(size for _, size in self.mesh)
        names = tuple(name for name, _ in self.mesh)
        training = replace(
            config.training,
            global_batch_size=None,
            micro_batch_size=self.micro_batch_size,
            gradient_accumulation_steps=self.microbatches,
            remat=self.remat,
            zero_stage=self.zero_stage,
            offload_optimizer=self.offload,
            loss_chunk=self.loss_chunk,
            pipeline_schedule=self.schedule or config.training.pipeline_schedule,
            pipeline_chunks=self.chunks,
            pipeline_gather=self.gather,
        )
        model = replace(
            config.model,
            mesh_shape=(sizes, names),
            sequence_parallel=self.sequence_parallel,
        )
        return replace(config, model=model, training=training)

    @classmethod
    def of(cls, config: Config) -> "Layout":
        """The layout that a configuration has; its batch is that of a mesh already."""
        training = config.training
        sizes, names = config.model.mesh_shape
        is_pipeline = "pp" in names
        return cls(
            mesh=tuple(zip(names, sizes, strict=True)),
            micro_batch_size=training.micro_batch_size,
            microbatches=training.gradient_accumulation_steps,
            remat=training.remat,
            zero_stage=training.zero_stage,
            offload=training.offload_optimizer,
            loss_chunk=training.loss_chunk,
            schedule=training.pipeline_schedule if is_pipeline else None,
            chunks=training.pipeline_chunks if is_pipeline else 1,
            gather=training.pipeline_gather if is_pipeline else "tick",
            sequence_parallel=config.model.sequence_parallel,
        )

    def overrides(self) -> list[str]:
        """The words of a command line that give a run this layout."""
        return list(self._overrides())

    def _overrides(self) -> Iterator[str]:
        sizes = ",".join(str(size) for _, size in self.mesh)
        names = ",".join(name for name, _ in self.mesh)
        yield f"model.mesh_shape=[[{sizes}],[{names}]]"
        if self.sequence_parallel:
            yield "model.sequence_parallel=true"
        yield f"training.micro_batch_size={self.micro_batch_size}"
        if isinstance(self.remat, str):
            yield f"training.remat={self.remat}"
        else:
            yield f"training.remat={json.dumps(self.remat, separators=(',', ':'))}"
        if self.zero_stage:
            yield f"training.zero_stage={self.zero_stage}"
        if self.offload:
            yield "training.offload_optimizer=true"
        if self.loss_chunk != "auto":
            yield f"training.loss_chunk={self.loss_chunk}"
        if self.schedule:
            yield f"training.pipeline_schedule={self.schedule}"
            if self.chunks > 1:
                yield f"training.pipeline_chunks={self.chunks}"
            if self.gather != "tick":
                yield f"training.pipeline_gather={self.gather}"
