# SPDX-License-Identifier: Apache-2.0
"""Resumed runs: bit for bit, on other meshes, and from exported weights."""

import io
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tessera.train.checkpoints.checkpoint_folder import complete_steps
from tessera.train.checkpoints.choose_checkpoint import Choice, choose
from tessera.train.checkpoints.saving import Checkpoints
from tessera.train.loop.build_run import Run
from tessera.train.loop.console import Console
from tessera.train.loop.metrics import MetricWriter
from tessera.train.loop.run_folder import open_run_folder
from tessera.train.loop.train_state import TrainState
from tessera.train.loop.training_loop import Trainer
from tessera.train.models.weights import export_weights


def run(job: Run, path: Path, resume: str = "none") -> tuple[TrainState, Choice]:
    """What ``run_training.py`` does with a job."""
    corpus, choice = job.load_data(), choose(resume, path)
    choice.check(job, corpus, "")
    folder = open_run_folder(path, "", choice.own_step)
    with (
        MetricWriter(folder) as writer,
        Console(None, stream=io.StringIO(), terminal=False) as console,
        Checkpoints(job, choice.root, "", choice.own_step) as checkpoints,
    ):
        trainer = Trainer(
            *(job, corpus, console, writer, None, checkpoints, choice.checkpoint)
        )
        return trainer.train(), choice


def losses(path: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def whole(run_of, tmp_path_factory):
    """Eight steps in one go, with a checkpoint after every second."""
    path = tmp_path_factory.mktemp("whole")
    job = run_of(micro_batch_size=8)
    state, _ = run(job, path)
    assert complete_steps(path / "checkpoints") == [8, 6, 4]
    return job, state, path


@pytest.mark.full
def test_an_earlier_checkpoint_leads_to_the_same_bits(whole, tmp_path):
    step = 4
    job, state, path = whole
    resumed, choice = run(job, tmp_path, str(path / "checkpoints" / str(step)))
    assert choice.own_step is None
    assert int(resumed.step) == 8
    for a, b in zip(jax.tree.leaves(resumed), jax.tree.leaves(state), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    after = [line["loss"] for line in losses(path)[step:]]
    assert [line["loss"] for line in losses(tmp_path)] == after
    assert complete_steps(tmp_path / "checkpoints") == [*range(8, step, -2)]


@pytest.mark.full
@pytest.mark.parametrize(
    "mesh",
    [
        {"fsdp": 4, "micro_batch_size": 2},
        {"tp": 2, "micro_batch_size": 8},
        {"pp": 2, "micro_batch_size": 2},
    ],
    ids=["fsdp", "tp", "pp"],
)
def test_another_mesh_continues_with_the_same_rows(whole, run_of, tmp_path, mesh):
    _, _, path = whole
    state, _ = run(run_of(**mesh), tmp_path, str(path / "checkpoints" / "4"))
    assert int(state.step) == 8
    for alone, here in zip(losses(path)[4:], losses(tmp_path), strict=True):
        assert here["step"] == alone["step"]
        assert here["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        assert here["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-4)


@pytest.mark.full
def test_a_run_that_is_done_has_nothing_left_to_do(whole, tmp_path):
    job, state, path = whole
    resumed, choice = run(job, tmp_path, str(path))
    assert choice.checkpoint.metadata.step == 8
    assert losses(tmp_path) == []
    for a, b in zip(jax.tree.leaves(resumed), jax.tree.leaves(state), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_an_earlier_step_of_its_own_folder_sets_the_later_ones_aside(whole, tmp_path):
    job, _, path = whole
    folder = tmp_path / "run"
    run(job, folder, str(path / "checkpoints" / "4"))
    assert complete_steps(folder / "checkpoints") == [8, 6]
    _, choice = run(job, folder, str(folder / "checkpoints" / "6"))
    assert choice.own_step == 6
    names = sorted(entry.name for entry in (folder / "checkpoints").iterdir())
    assert names == ["6", "8", "8.replaced"]
    steps = [line["step"] for line in losses(folder)]
    assert all(after == before + 1 for before, after in pairwise(steps))
    assert steps[-1] == 8


@pytest.mark.full
def test_a_run_starts_with_the_weights_of_init_from(whole, run_of, tmp_path):
    _, state, path = whole
    file = tmp_path / "weights.safetensors"
    export_weights(state.params, file)
    given = run_of(micro_batch_size=8, steps=1, init_from=str(file))
    run(given, tmp_path / "run")
    first = losses(tmp_path / "run")[0]["loss"]
    # The first batch again, after eight steps of learning.
    assert first < losses(path)[0]["loss"] - 0.2
    again, _ = run(given, tmp_path / "run", "auto")
    assert int(again.step) == 1
