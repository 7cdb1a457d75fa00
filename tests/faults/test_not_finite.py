# SPDX-License-Identifier: Apache-2.0
"""A loss that is not finite, on two devices, from targets that are no token."""

import io
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tessera.errors import NonFiniteError
from tessera.train.checkpoints.saving import Checkpoints
from tessera.train.config.command_line import compose
from tessera.train.config.mesh_shape import mesh_of_shape
from tessera.train.data import Corpus
from tessera.train.loop.build_run import Run as TrainingRun
from tessera.train.loop.console import Console
from tessera.train.loop.metrics import MetricWriter
from tessera.train.loop.run_folder import open_run_folder
from tessera.train.loop.training_loop import Trainer

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL = (
    *("data=synthetic", "model.num_layers=1", "model.d_model=32", "model.mlp_dim=32"),
    *("model.mesh_shape=[[2],[dp]]", "training.zero_stage=1"),
    *(
        "training.steps=6",
        "training.sequence_length=16",
        "training.sample_length=0",
        "training.report=false",
    ),
    *("training.micro_batch_size=2", "training.validate_every=0"),
    *("training.validation_sequences=4", "training.checkpoint_every=2"),
    *("optimizer.warmup_steps=0", "training.max_skipped_steps=1"),
)


class Poisoned:
    """Data in which one target of some steps is no token: its loss is NaN."""

    def __init__(self, corpus: Corpus, steps: set[int]) -> None:
        self._corpus, self._steps = corpus, steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._corpus, name)

    def train(self, *args: Any, **options: Any) -> Iterator[dict[str, np.ndarray]]:
        batches = self._corpus.train(*args, **options)
        for step, batch in enumerate(batches, 1):
            if step in self._steps:
                batch = {name: array.copy() for name, array in batch.items()}
                batch["targets"][0, 3] = 2**20
            yield batch


class Run:
    """A run with poisoned steps; ``states`` are copies of those after each step."""

    job = None

    def __init__(self, path: Path, poisoned: set[int]) -> None:
        # One compiled step serves all runs.
        settings = compose([*SMALL], CONFIGS).config
        Run.job = job = Run.job or TrainingRun(
            settings, mesh_of_shape(settings.model.mesh_shape)
        )
        folder, seen = open_run_folder(path, ""), io.StringIO()
        self.states: list[Any] = []
        self.error: NonFiniteError | None = None
        corpus = Poisoned(job.load_data(), poisoned)
        with (
            MetricWriter(folder) as writer,
            Console(folder.log, stream=seen, terminal=False) as console,
            Checkpoints(job, path / "checkpoints", "") as checkpoints,
        ):
            trainer = Trainer(job, corpus, console, writer, None, checkpoints)
            trainer.run = Recorded(job, self.states)
            try:
                trainer.train()
            except NonFiniteError as error:
                self.error = error
        self.seen = seen.getvalue()
        lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
        self.steps = [line for line in lines if "loss" in line]


class Recorded:
    """A job whose step leaves a copy of what it makes."""

    def __init__(self, job: TrainingRun, states: list[Any]) -> None:
        self._job, self._states = job, states

    def __getattr__(self, name: str) -> Any:
        return getattr(self._job, name)

    def step(self, state: Any, batch: Any) -> Any:
        if not self._states:
            self._states.append(jax.tree.map(np.array, state))
        new, metrics = self._job.step(state, batch)
        self._states.append(jax.tree.map(np.array, new))
        return new, metrics


def is_equal(left: Any, right: Any) -> bool:
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return all(one.tobytes() == other.tobytes() for one, other in pairs)


@pytest.mark.full
def test_a_step_whose_loss_is_not_finite_changes_nothing_and_is_counted(tmp_path):
    run = Run(tmp_path, {3, 5})
    assert run.error is None
    for step in (1, 2, 3, 4, 5, 6):
        same = is_equal(run.states[step - 1], run.states[step])
        assert same == (step in (3, 5)), step
    assert [line["skipped"] for line in run.steps] == [0, 0, 1, 0, 1, 0]
    assert [line["skipped_in_a_row"] for line in run.steps] == [0, 0, 1, 0, 1, 0]
    assert run.steps[2]["loss"] == "NaN"
    for leaf in jax.tree.leaves(run.states[-1]):
        assert np.isfinite(leaf).all()
    assert "step 3 is skipped, the parameters stay as they are: loss nan" in run.seen


@pytest.mark.full
def test_one_skipped_step_too_many_in_a_row_ends_the_run(tmp_path):
    run = Run(tmp_path, {3, 5, 6})
    what, got, fix, _ = str(run.error).splitlines()
    assert what == (
        "[T508] no finite loss and gradients at step 6, and so 2 times in a row, of "
        "which training.max_skipped_steps=1 may be skipped"
    )
    assert got.startswith("  got: loss nan, norm of the gradients ")
    assert fix == (
        "  fix: look for the cause in the data or in a learning rate that is too high; "
        f"the last complete checkpoint is {tmp_path}/checkpoints/4"
    )
    # The steps that were skipped learned nothing, and none was saved after the last.
    assert is_equal(run.states[4], run.states[6])
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"2", "4"}
    assert not math.isnan(run.steps[3]["loss"])
