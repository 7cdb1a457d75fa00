# SPDX-License-Identifier: Apache-2.0
"""Runs of a few steps of a small model, for the tests of the training loop."""

import dataclasses
import io
import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from tessera.train.config.mesh_shape import mesh_of_shape
from tessera.train.config.optimizer_config import AdamWConfig
from tessera.train.config.run_config import (
    Config,
    ModelConfig,
    TrainingConfig,
)
from tessera.train.data.data_config import DataConfig, SyntheticConfig
from tessera.train.loop.build_run import Run
from tessera.train.loop.console import Console
from tessera.train.loop.metrics import MetricWriter
from tessera.train.loop.run_folder import open_run_folder
from tessera.train.loop.train_state import TrainState
from tessera.train.loop.training_loop import Trainer
from tests.small_model import SMALL

CONFIG = dataclasses.replace(SMALL, vocab_size=264)
STEPS = 12
SYNTHETIC = DataConfig(name="synthetic", synthetic=SyntheticConfig(tokens=4000))
NO_VALIDATION = dataclasses.replace(SYNTHETIC, validation_fraction=0.0)


def settings_of(**changed: Any) -> Config:
    """A short run on synthetic data, on one device."""
    training = TrainingConfig(
        steps=STEPS,
        sequence_length=16,
        micro_batch_size=4,
        log_every=5,
        validate_every=5,
        validation_sequences=8,
        sample_length=6,
    )
    fields: dict[str, Any] = {
        "name": "small",
        "model": ModelConfig(name="small", mesh_shape=((1,), ("fsdp",)), config=CONFIG),
        "training": training,
        "data": SYNTHETIC,
        "optimizer": AdamWConfig(warmup_steps=2, learning_rate=0.01),
    }
    return Config(**{**fields, **changed})


def run_of(settings: Config) -> Run:
    return Run(settings, mesh_of_shape(settings.model.mesh_shape))


@cache
def short_run() -> "Ran":
    """The run of ``settings_of()``, which tests of several modules share."""
    with tempfile.TemporaryDirectory() as folder:
        return train(run_of(settings_of()), Path(folder))


def with_program_of(ran: "Ran", settings: Config) -> Run:
    """A run that runs the compiled step of another, which differs in no array."""
    run = run_of(settings)
    names = ("step", "compiled", "evaluate")
    vars(run).update({name: getattr(ran.run, name) for name in names})
    return run


@dataclasses.dataclass
class Ran:
    """What a run left."""

    run: Run
    state: TrainState
    seen: str
    lines: list[dict[str, Any]]

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if "loss" in line]

    @property
    def validations(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if "val_loss" in line]

    @property
    def numbers(self) -> list[dict[str, Any]]:
        """Every line without what a clock said."""
        clock = {"tokens_per_second", "step_seconds", "data_wait_fraction"}
        return [
            {name: value for name, value in line.items() if name not in clock}
            for line in self.lines
        ]


def train(run: Run, path: Path) -> Ran:
    corpus, folder, seen = run.load_data(), open_run_folder(path, ""), io.StringIO()
    with (
        MetricWriter(folder) as writer,
        Console(folder.log, stream=seen, terminal=False) as console,
    ):
        state = Trainer(run, corpus, console, writer).train()
    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    return Ran(run, state, seen.getvalue(), lines)
