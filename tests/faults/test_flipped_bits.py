# SPDX-License-Identifier: Apache-2.0
"""A device that flips a bit: in one of two processes; with kills on the way back."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.curves import curve
from tests.faults.trainer import ROOT, SMALL, environ, train_here

LIMIT = 240.0
SETTINGS = (
    *(*SMALL, "model.mesh_shape=[[4],[fsdp]]", "training.steps=8"),
    *("runtime.verify_every=3", "training.numerics=deterministic"),
    *("training.checkpoint_every=2", "training.resume=auto"),
)
LAUNCHER = ("-m", "tessera.train.commands.launch", "--nprocs=2")


def train_flipped(folder: Path, *launcher: str, **variables: str) -> tuple[int, str]:
    """The exit code of a run with flipped bits, and what it said."""
    program = str(ROOT / "tests/faults/flipped_run.py")
    done = subprocess.run(
        [
            *(sys.executable, *launcher, program, *SETTINGS),
            f"hydra.run.dir={folder}",
        ],
        cwd=ROOT,
        env=environ(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
    )
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The curve of the run on four devices of one process, with no flipped bit."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert train_here(*SETTINGS, f"hydra.run.dir={folder}") == 0
    said = (folder / "train.log").read_text()
    assert "step 6 is verified: equal bits on other devices" in said
    return steps_of(folder)


def steps_of(folder: Path) -> list[dict]:
    return [line for line in curve(folder) if "loss" in line]


@pytest.mark.full
def test_the_devices_of_one_of_two_processes_are_named_and_both_go_back(
    undisturbed, tmp_path
):
    """And the second time, both end with code 74."""
    code, said = train_flipped(
        *(tmp_path, *LAUNCHER), FLIPPED_CALLS="6,10", FLIPPED_POSITION="3"
    )
    assert code == 74, said
    assert "T716" in said
    first, _, second = said.partition(
        "set back from step 6 to the checkpoint of step 2"
    )
    assert second, said
    (line,) = {
        line.split("] ", 1)[1]
        for line in first.splitlines()
        if "values differ on device" in line
    }
    # Two devices of a process: there is no third order to tell which is wrong.
    assert line.count("of process 1") == 2
    assert "process 0" not in line
    # Steps 3 to 5 are those that were taken again.
    assert "step 5/8" in second
    assert steps_of(tmp_path)[:5] == undisturbed[:5]


@pytest.mark.full
@pytest.mark.parametrize(
    "place",
    [
        "tessera.train.checkpoints.checkpoint_folder:quarantine",
        "tessera.train.checkpoints.saving:Checkpoints.set_back",
        "tessera.train.loop.metrics:MetricWriter.set_back",
    ],
    ids=["one checkpoint renamed", "before the metrics", "after the metrics"],
)
def test_a_run_that_is_killed_as_it_goes_back_goes_on_to_the_same_curve(
    place, undisturbed, tmp_path
):
    variables = {"FLIPPED_CALLS": "6", "FLIPPED_POSITION": "2", "KILLED_AFTER": place}
    code, said = train_flipped(tmp_path, **variables)
    assert code == -signal.SIGKILL, said
    assert "values differ on device 2" in said
    assert train_here(*SETTINGS, f"hydra.run.dir={tmp_path}") == 0
    assert steps_of(tmp_path) == undisturbed
