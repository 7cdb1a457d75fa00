# SPDX-License-Identifier: Apache-2.0
"""Spikes in runs: skipped or logged; the curve and what is recorded."""

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tessera.errors import SpikeError, TesseraError
from tessera.train.checkpoints.choose_checkpoint import choose
from tessera.train.checkpoints.saving import Checkpoints
from tessera.train.config.run_config import ModelConfig, RuntimeConfig, TrainingConfig
from tessera.train.loop.build_run import Run
from tessera.train.loop.console import Console
from tessera.train.loop.metrics import MetricWriter
from tessera.train.loop.run_folder import open_run_folder
from tessera.train.loop.training_loop import Trainer
from tests.train.config.small_settings import check, settings
from tests.train.loop.short_runs import CONFIG, NO_VALIDATION, run_of, settings_of
from tests.train.loop.test_spikes import reference as z_score

ROWS = 2


def make_run(
    on_spike: str,
    in_flight: int = 8,
    sizes: tuple[int, ...] = (1,),
    axes: tuple[str, ...] = ("fsdp",),
    **training: Any,
) -> Run:
    fields = {
        "steps": 12,
        "sequence_length": 16,
        "micro_batch_size": ROWS,
        "validate_every": 0,
        "sample_length": 0,
        "checkpoint_every": 3,
        "on_spike": on_spike,
        "spike_window": 4,
        "spike_threshold": 12.0,
        **training,
    }
    return run_of(
        settings_of(
            model=ModelConfig(name="small", mesh_shape=(sizes, axes), config=CONFIG),
            training=TrainingConfig(**fields),
            runtime=RuntimeConfig(max_steps_in_flight=in_flight),
            data=NO_VALIDATION,
        )
    )


class Spiked:
    """A step whose loss is large where the batch begins with one of some rows.

    The step itself judges: it is called with small losses in its window.
    """

    def __init__(self, run: Run, first_tokens: set[bytes]) -> None:
        self._run, self._step, self._spikes = run, run.step, first_tokens

    def __call__(self, state: Any, batch: Any) -> Any:
        if np.asarray(batch["tokens"])[0, 0].tobytes() in self._spikes:
            window = state.spikes
            before, small = np.array(window.losses), np.array(window.losses * 0.01)
            new, metrics = self._step(self._with_losses(state, small), batch)
            after = np.array(new.spikes.losses)
            # What the step has left in the window was not small.
            restored = np.where(after == small, before, after)
            return self._with_losses(new, restored), metrics
        return self._step(state, batch)

    def _with_losses(self, state: Any, losses: np.ndarray) -> Any:
        placed = jax.device_put(losses, state.spikes.losses.sharding)
        spikes = dataclasses.replace(state.spikes, losses=placed)
        return dataclasses.replace(state, spikes=spikes)


class Trained:
    """What a run left, whose batches of some numbers are spikes."""

    def __init__(
        self, run: Run, path: Path, spiked: set[int], resume: str = "none"
    ) -> None:
        corpus, seen = run.load_data(), io.StringIO()
        batches = corpus.train(ROWS)
        firsts = {
            n: batch["tokens"][0].tobytes()
            for n, batch in zip(range(1, 40), batches, strict=False)
        }
        batches.close()
        other = Run(run.config, run.mesh)
        step = Spiked(run, {firsts[n] for n in spiked})
        vars(other).update(compiled=run.compiled, step=step)
        choice = choose(resume, path)
        folder = open_run_folder(path, "", choice.own_step)
        self.error: TesseraError | None = None
        with (
            MetricWriter(folder) as writer,
            Console(folder.log, stream=seen, terminal=False) as console,
            Checkpoints(other, choice.root, "", choice.own_step) as checkpoints,
        ):
            trainer = Trainer(
                *(other, corpus, console, writer, None, checkpoints, choice.checkpoint)
            )
            try:
                self.state = jax.tree.map(np.asarray, trainer.train())
            except SpikeError as error:
                self.error = error
        self.seen, self.root = seen.getvalue(), choice.root
        self.lines = [*map(json.loads, folder.metrics.read_text().splitlines())]
        self.steps = [line for line in self.lines if "loss" in line]
        self.losses = [line["loss"] for line in self.steps]


@pytest.mark.full
def test_a_skipped_spike_changes_nothing_and_is_recorded(tmp_path):
    skip = make_run("skip", max_skipped_steps=1)
    run = Trained(skip, tmp_path / "one", {8})
    assert run.error is None
    assert [line["spike"] for line in run.steps] == [0] * 7 + [1] + [0] * 4
    assert [line["skipped"] for line in run.steps] == [0] * 7 + [1] + [0] * 4
    # The step is taken back as its number is: the rate does not move on.
    assert int(run.state.step) == 11
    assert "step 8: a spike" in run.seen
    twice = Trained(skip, tmp_path / "two", {8, 9})
    assert twice.error is not None
    assert "2 spikes in a row at step 9" in str(twice.error)


@pytest.mark.full
def test_a_resumed_run_judges_as_one_that_was_not_stopped(tmp_path):
    warn = make_run("warn")
    whole = Trained(warn, tmp_path / "whole", set())
    half = Run(
        dataclasses.replace(
            warn.config, training=dataclasses.replace(warn.config.training, steps=6)
        ),
        warn.mesh,
    )
    vars(half).update(compiled=warn.compiled, step=warn.step)
    Trained(half, tmp_path / "half", set())
    resumed = Trained(warn, tmp_path / "half", set(), resume="auto")
    scores = [[line["loss_z"] for line in run.steps] for run in (whole, resumed)]
    assert scores[0] == scores[1]
    assert scores[0][3:5].count("NaN") == 1


@pytest.mark.full
@pytest.mark.parametrize(
    ("sizes", "axes", "training"),
    [
        ((2, 2), ("dp", "tp"), {"zero_stage": 1, "mixed_precision": "fp16"}),
        ((2, 2), ("pp", "fsdp"), {"gradient_accumulation_steps": 2}),
    ],
    ids=["zero and fp16", "pipeline"],
)
def test_every_layout_judges_by_the_numbers_that_it_shows(
    sizes, axes, training, tmp_path
):
    # So close to the median, that some steps are spikes and others are not.
    run = make_run("skip", 8, sizes, axes, spike_threshold=0.5, steps=10, **training)
    lines = Trained(run, tmp_path, set()).steps
    losses, norms = list[float](), list[float]()
    for line in lines:
        loss, norm = line["loss"], line["grad_norm"]
        spike = False
        if len(losses) >= 4:
            scores = (z_score(losses[-4:], loss), z_score(norms[-4:], norm))
            assert (line["loss_z"], line["grad_norm_z"]) == pytest.approx(
                scores, rel=1e-3, abs=1e-3
            )
            spike = max(scores) > 0.5
        assert line["spike"] == spike
        assert line["skipped"] >= spike
        if not line["skipped"]:
            losses.append(loss)
            norms.append(norm)
    assert {line["spike"] for line in lines} == {0, 1}


def test_without_checkpoints_there_is_nothing_to_resume_from():
    given = settings(checkpoint_every=None, numerics="deterministic")
    given = dataclasses.replace(given, runtime=RuntimeConfig(verify_every=2))
    (error,) = check(given)
    assert error.code == "T507"
    assert error.got.endswith(": there are no checkpoints to resume from")
