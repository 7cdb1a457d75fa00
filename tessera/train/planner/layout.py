# SPDX-License-Identifier: Apache-2.0
"""``Layout``: what the planner chooses for a run, a mesh and the settings with it."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from tessera.train.config.run_config import Config, data_parallel_groups
from tessera.train.models.layer_scan import FULL, NONE

SETTINGS: Final = {
    "sequence_parallel": "model.sequence_parallel",
    "micro_batch_size": "training.micro_batch_size",
    "microbatches": "training.gradient_accumulation_steps",
    "remat": "training.remat",
    "zero_stage": "training.zero_stage",
    "offload": "training.offload_optimizer",
    "loss_chunk": "training.loss_chunk",
    "schedule": "training.pipeline_schedule",
    "chunks": "training.pipeline_chunks",
    "gather": "training.pipeline_gather",
}
"""The setting of each part of a layout but its mesh, which is ``model.mesh_shape``."""

_ALWAYS_SET: Final = ("micro_batch_size", "remat")
_OF_PIPELINES: Final = ("schedule", "chunks", "gather")


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
    gather: str = "microbatch"
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

    @property
    def recomputes_stages(self) -> bool:
        """Whether the backward pass of a pipeline's stage runs the stage again."""
        return self.schedule is not None and self.remat == FULL

    @property
    def kept_policy(self) -> str:
        """The policy of ``remat`` by whose rule a microbatch keeps residuals.

        Under ``none`` stages keep nothing that is elementwise: what ``dots`` keeps.
        """
        is_lean = self.schedule is not None and self.remat == NONE
        return "dots" if is_lean else str(self.remat)

    def applied(self, config: Config) -> Config:
        """A configuration with this layout in it."""
        names, sizes = zip(*self.mesh, strict=True)
        values: dict[str, dict[str, Any]] = {
            "model": {"mesh_shape": (sizes, names)},
            "training": {"global_batch_size": None},
        }
        for part, path in SETTINGS.items():
            group, _, name = path.partition(".")
            if part != "schedule" or self.schedule:
                values[group][name] = getattr(self, part)
        model = replace(config.model, **values["model"])
        training = replace(config.training, **values["training"])
        return replace(config, model=model, training=training)

    @classmethod
    def of(cls, config: Config) -> "Layout":
        """The layout that a configuration has; its batch is that of a mesh already."""
        sizes, names = config.model.mesh_shape
        values = {}
        for part, path in SETTINGS.items():
            group, _, name = path.partition(".")
            if "pp" in names or part not in _OF_PIPELINES:
                values[part] = getattr(getattr(config, group), name)
        return cls(mesh=tuple(zip(names, sizes, strict=True)), **values)

    def overrides(self) -> list[str]:
        """The words of a command line that give a run this layout."""
        names, sizes = (
            ",".join(map(str, part)) for part in zip(*self.mesh, strict=True)
        )
        words = [f"model.mesh_shape=[[{sizes}],[{names}]]"]
        unset = {each.name: each.default for each in fields(self)}
        unset["microbatches"] = self.microbatches  # they follow from the global batch
        for part, path in SETTINGS.items():
            value = getattr(self, part)
            if part in _ALWAYS_SET or value != unset[part]:
                words.append(override(path, value))
        return words


def override(path: str, value: Any) -> str:
    """The word of a command line that gives a setting a value.

    Example:
      >>> override("training.remat", ["full", "none"])
      'training.remat=["full","none"]'
    """
    is_text = isinstance(value, str)
    text = value if is_text else json.dumps(value, separators=(",", ":"))
    return f"{path}={text}"


def without(words: Iterable[str], *paths: str) -> list[str]:
    """The words of a command line that set none of these settings."""
    return [word for word in words if word.partition("=")[0] not in paths]
