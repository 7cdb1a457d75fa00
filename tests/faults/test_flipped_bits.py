# SPDX-License-Identifier: Apache-2.0
"""A device that flips a bit: in one of two processes; with a kill as the run ends."""

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
def test_the_devices_of_one_of_two_processes_are_named_and_both_end(
    undisturbed, tmp_path
):
    code, said = train_flipped(
        *(tmp_path, *LAUNCHER), FLIPPED_CALLS="6", FLIPPED_POSITION="3"
    )
    assert code == 74, said
    assert "T716" in said
    (line,) = {
        line.partition("step 6: ")[2]
        for line in said.splitlines()
        if "values differ on device" in line
    }
    # Two devices of a process: there is no third order to tell which is wrong.
    assert line.count("of process 1") == 2
    assert "process 0" not in line
    kept = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert {name for name in kept if name.isdecimal()} == {"2"}
    assert steps_of(tmp_path) == undisturbed[:5]


@pytest.mark.full
def test_a_run_that_is_killed_as_it_renames_goes_on_to_the_same_curve(
    undisturbed, tmp_path
):
    place = "tessera.train.checkpoints.checkpoint_folder:quarantine"
    variables = {"FLIPPED_CALLS": "6", "FLIPPED_POSITION": "2", "KILLED_AFTER": place}
    code, said = train_flipped(tmp_path, **variables)
    assert code == -signal.SIGKILL, said
    assert "values differ on device 2" in said
    assert train_here(*SETTINGS, f"hydra.run.dir={tmp_path}") == 0
    assert steps_of(tmp_path) == undisturbed
