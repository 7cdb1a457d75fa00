# SPDX-License-Identifier: Apache-2.0
"""Repeated steps: a bit that is flipped on one simulated device is found and named."""

import dataclasses
import io
import json
from collections import defaultdict
from pathlib import Path

import jax
import numpy as np
import pytest

from tessera.errors import WrongValuesError
from tessera.train.checkpoints.checkpoint_folder import read_verified_step
from tessera.train.checkpoints.choose_checkpoint import choose
from tessera.train.checkpoints.saving import Checkpoints
from tessera.train.config.run_config import ModelConfig, RuntimeConfig, TrainingConfig
from tessera.train.loop.build_run import Run
from tessera.train.loop.console import Console
from tessera.train.loop.metrics import MetricWriter
from tessera.train.loop.run_folder import open_run_folder
from tessera.train.loop.step_verification import rotated
from tessera.train.loop.training_loop import Trainer
from tests.train.loop.flipped_step import Flipped
from tests.train.loop.short_runs import CONFIG, NO_VALIDATION, run_of, settings_of

ROTATED: dict[str, dict[int, Run]] = defaultdict(dict)


def make_run(
    verify_every: int | None = 3, sizes=(4,), axes=("fsdp",), layers=1, **training
) -> Run:
    fields = {
        "steps": 8,
        "sequence_length": 16,
        "micro_batch_size": 2,
        "validate_every": 0,
        "sample_length": 0,
        "checkpoint_every": 2,
        "numerics": "deterministic",
        "keep": None,
        **training,
    }
    config = dataclasses.replace(CONFIG, num_layers=layers)
    return run_of(
        settings_of(
            model=ModelConfig(name="small", mesh_shape=(sizes, axes), config=config),
            training=TrainingConfig(**fields),
            runtime=RuntimeConfig(verify_every=verify_every),
            data=NO_VALIDATION,
        )
    )


class Trained:
    """What a run left, which may have ended with an error."""

    def __init__(self, run: Run, path: Path, resume: str = "none") -> None:
        corpus, seen = run.load_data(), io.StringIO()
        choice = choose(resume, path)
        folder = open_run_folder(path, "", choice.own_step)
        self.error: WrongValuesError | None = None
        with (
            MetricWriter(folder) as writer,
            Console(folder.log, stream=seen, terminal=False) as console,
            Checkpoints(run, choice.root, "", choice.own_step) as checkpoints,
        ):
            trainer = Trainer(
                *(run, corpus, console, writer, None, checkpoints, choice.checkpoint)
            )
            # Each order is compiled once for all runs of the same settings.
            vars(trainer._verification)["_runs"] = ROTATED[str(run.config)]
            try:
                self.state = jax.tree.map(np.asarray, trainer.train())
            except WrongValuesError as error:
                self.error = error
        self.seen = seen.getvalue()
        self.root = choice.root
        self.lines = [*map(json.loads, folder.metrics.read_text().splitlines())]
        self.losses = {x["step"]: x["loss"] for x in self.lines if "loss" in x}

    def has_curve_of(self, other: "Trained") -> bool:
        steps = [line["step"] for line in self.lines if "loss" in line]
        pairs = zip(
            jax.tree.leaves(self.state), jax.tree.leaves(other.state), strict=True
        )
        is_equal = all(left.tobytes() == right.tobytes() for left, right in pairs)
        return is_equal and self.losses == other.losses and steps == [*other.losses]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Trained:
    return Trained(make_run(None), tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture(scope="module")
def run() -> Run:
    """A run that verifies every third step; tests share its programs."""
    return make_run()


def with_flips(run: Run, device: int, calls: set[int]) -> Run:
    other = Run(run.config, run.mesh)
    vars(other).update(compiled=run.compiled, step=Flipped(run.step, device, calls))
    return other


def test_devices_are_rotated(run):
    assert run.mesh.device_ids == (0, 1, 2, 3)
    assert rotated(run.mesh, 1).device_ids == (1, 2, 3, 0)
    assert rotated(run.mesh, 1).shape == run.mesh.shape


@pytest.mark.full
def test_a_run_whose_steps_can_be_repeated_has_the_same_bits(
    run, undisturbed, tmp_path
):
    verified = Trained(run, tmp_path)
    assert verified.has_curve_of(undisturbed)
    assert "step 3 is verified: equal bits on other devices" in verified.seen
    assert "step 6 is verified" in verified.seen
    assert read_verified_step(verified.root) == 6


@pytest.mark.full
def test_a_flipped_bit_names_its_device_and_a_resumed_run_begins_before_it(
    run, undisturbed, tmp_path
):
    # The sixth call is step 6, which is verified; step 3 was, so checkpoint 2 counts.
    hit = Trained(with_flips(run, 2, {6}), tmp_path)
    assert hit.error is not None
    assert hit.error.code == "T716"
    assert hit.error.exit_code == 74
    assert hit.error.got == (
        "step 6: repeated in another order, values differ on device 2"
    )
    # That of step 4 was not verified.
    assert {path.name for path in hit.root.iterdir()} == {"2", "4.replaced", "verified"}
    resumed = Trained(run, tmp_path, resume="auto")
    assert resumed.has_curve_of(undisturbed)


@pytest.mark.full
def test_of_two_devices_both_are_named_whichever_is_wrong(tmp_path):
    run = make_run(3, (2,), ("fsdp",), steps=3, micro_batch_size=4)
    for device in (0, 1):
        hit = Trained(with_flips(run, device, {3}), tmp_path / str(device))
        assert "values differ on device 0, device 1: one of them" in hit.error.got


@pytest.mark.full
def test_a_process_with_one_device_repeats_its_steps_there_and_says_so(tmp_path):
    run = make_run(3, (1,), ("fsdp",), steps=3, micro_batch_size=8)
    hit = Trained(with_flips(run, 0, {3}), tmp_path / "hit")
    assert hit.error.got.endswith(
        "repeated on the same devices, values differ on device 0"
    )
    verified = Trained(run, tmp_path / "verified")
    assert "step 3 is verified: equal bits on the same devices" in verified.seen


@pytest.mark.full
def test_before_anything_is_verified_a_resumed_run_begins_anew(
    run, undisturbed, tmp_path
):
    hit = Trained(with_flips(run, 1, {3}), tmp_path)
    assert hit.error.got.endswith("values differ on device 1")
    assert {path.name for path in hit.root.iterdir()} == {"2.replaced"}
    resumed = Trained(run, tmp_path, resume="auto")
    assert resumed.has_curve_of(undisturbed)


@pytest.mark.full
def test_what_a_run_began_with_stays_where_nothing_is_verified(
    run, undisturbed, tmp_path
):
    Trained(make_run(None, steps=4), tmp_path)
    # Its second call is step 6.
    hit = Trained(with_flips(run, 1, {2}), tmp_path, resume="auto")
    assert hit.error.got.startswith("step 6: ")
    names = {path.name for path in hit.root.iterdir() if path.name.isdecimal()}
    assert names == {"2", "4"}


@pytest.mark.full
def test_copies_that_differ_before_a_step_name_the_device(tmp_path):
    run = make_run(3, (4,), ("dp",), steps=3)
    # Every device has all parameters: step 2 is not repeated, but leaves a trace.
    hit = Trained(with_flips(run, 3, {2}), tmp_path)
    assert hit.error.got.endswith(
        "copies of the state differ before the step, on device 3"
    )


@pytest.mark.full
def test_what_is_verified_is_kept_beyond_the_newest(run, tmp_path):
    keeping = make_run(3, keep=1, checkpoint_every=1)
    # Neither setting is in a program.
    vars(keeping).update(compiled=run.compiled, step=run.step)
    ROTATED[str(keeping.config)] = ROTATED[str(run.config)]
    kept = Trained(keeping, tmp_path)
    names = {path.name for path in kept.root.iterdir() if path.name.isdecimal()}
    assert names == {"6", "8"}


@pytest.mark.full
@pytest.mark.parametrize(
    ("sizes", "axes", "training"),
    [
        ((2, 2), ("dp", "tp"), {"zero_stage": 1, "micro_batch_size": 4}),
        ((2, 2), ("pp", "fsdp"), {"gradient_accumulation_steps": 2, "layers": 2}),
    ],
    ids=["zero", "pipeline"],
)
def test_every_layout_has_equal_bits_on_other_devices(sizes, axes, training, tmp_path):
    done = Trained(make_run(1, sizes, axes, steps=3, **training), tmp_path)
    assert done.seen.count("is verified: equal bits on other devices") == 3
    assert done.error is None
