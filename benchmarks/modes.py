# SPDX-License-Identifier: Apache-2.0
"""The ways of training in parallel that are measured: one model, one batch, one table.

A pipeline cuts the batch into microbatches, the others take it whole: the tokens of a
step are the same. One way takes four devices, two or three together take eight.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import by_hand

from tessera.mesh import Mesh
from tessera.train.config.optimizer_config import AdamWConfig
from tessera.train.config.step_config import StepConfig
from tessera.train.loop.optimizers import make_optimizer
from tessera.train.loop.pipelined_model import schedule_of
from tessera.train.models.decoder.config import DecoderConfig
from tessera.train.models.decoder.decoder_model import DecoderModel
from tessera.train.models.named_models import config_of
from tessera.train.models.pipeline_stages import split_of


@dataclass(frozen=True)
class Mode:
    """A mesh, and what goes with it.

    Attributes:
      mesh: Sizes by axis, outermost first.
      schedule: Of the pipeline, where the mesh has an axis ``pp``.
      chunks: Runs of layers on each device of it.
      experts: Whether the model has them.
      model: What else the model is told.
      by_hand: The same step without Tessera.
    """

    mesh: dict[str, int]
    schedule: str = "1f1b"
    chunks: int = 1
    experts: bool = False
    model: dict[str, Any] = field(default_factory=dict)
    by_hand: Callable[[StepConfig], Any] | None = None

    @property
    def topology(self) -> str:
        """The mesh in a few characters."""
        return " ".join(f"{axis}={size}" for axis, size in self.mesh.items())

    def config(self, depth: int | None = None) -> DecoderConfig:
        """The model's sizes; ``depth`` is of layers in a stage, 8 layers otherwise."""
        stages = self.mesh.get("pp", 1) * self.chunks
        return replace(
            config_of("moe_tiny" if self.experts else "tiny"),
            d_model=64,
            mlp_dim=64 if self.experts else 128,
            num_layers=8 if depth is None else depth * stages,
            window=16,
            global_every=2,
        )

    def step_config(self, microbatches: int, depth: int | None = None) -> StepConfig:
        """The trainer's; ``microbatches`` are those of a pipeline, others have one."""
        sizes = tuple(self.mesh.values())
        mesh = Mesh(tuple(self.mesh), devices=range(prod(sizes)), shape=sizes)
        accumulation = microbatches if "pp" in self.mesh else 1
        config = self.config(depth)
        optimizer, rate = make_optimizer(AdamWConfig(), steps=100, clip_norm=1.0)
        return StepConfig(
            model=DecoderModel(
                config, split=split_of(mesh, config, self.chunks), **self.model
            ),
            optimizer=optimizer,
            learning_rate=rate,
            mesh=mesh,
            accumulation=accumulation,
            schedule=schedule_of(mesh, self.schedule, self.chunks, accumulation),
        )


MODES = {
    "dp": Mode({"dp": 4}, by_hand=by_hand.sharded),
    "fsdp": Mode({"fsdp": 4}, by_hand=by_hand.sharded),
    "tp": Mode({"tp": 4}, by_hand=by_hand.sharded),
    "tp_sequence": Mode(
        {"tp": 4}, model={"sequence_parallel": True}, by_hand=by_hand.sharded
    ),
    "cp_ring": Mode({"cp": 4}),
    "cp_all_to_all": Mode({"cp": 4}, model={"context_parallel": "all_to_all"}),
    "gpipe": Mode({"pp": 4}, "gpipe", by_hand=by_hand.gpipe),
    "1f1b": Mode({"pp": 4}),
    "interleaved": Mode({"pp": 4}, "interleaved", chunks=2),
    "zero_bubble": Mode({"pp": 4}, "zero_bubble"),
    "ep": Mode({"ep": 4}, experts=True),
    "pp_fsdp_tp": Mode({"pp": 2, "fsdp": 2, "tp": 2}),
    "dp_tp_pp": Mode({"dp": 2, "tp": 2, "pp": 2}),
    "fsdp_ep": Mode({"fsdp": 2, "ep": 4}, experts=True),
    "cp_tp": Mode({"cp": 4, "tp": 2}),
}
