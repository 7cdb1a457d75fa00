# SPDX-License-Identifier: Apache-2.0
"""A device that flips a bit: in one of two processes; with kills on the way back."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.curves import curve

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests/faults/flipped_run.py"
LIMIT = 240.0
SETTINGS = (
    *("model.d_model=32", "model.num_layers=1", "model.num_heads=2"),
    *("model.num_kv_heads=1", "model.head_dim=16", "model.mlp_dim=64"),
    *("model.mesh_shape=[[4],[fsdp]]", "runtime.platform=cpu"),
    *("runtime.verify_every=3", "training.numerics=deterministic"),
    *("data=synthetic", "data.synthetic.tokens=20000", "data.synthetic.vocab_size=64"),
    *("training.sequence_length=16", "training.micro_batch_size=2"),
    *("training.steps=8", "training.sample_length=0", "training.report=false"),
    *("training.validate_every=0", "optimizer.warmup_steps=2", "training.resume=auto"),
    *("training.checkpoint_every=2", "training.log_every=1"),
)
LAUNCHER = ("-m", "tessera.launch", "--nprocs=2")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache") / "compiled"


def train(folder: Path, cache: Path, *launcher: str, **environ: str) -> tuple[int, str]:
    """The exit code of a run, and what it said."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    program = str(PROGRAM if environ else ROOT / "run_training.py")
    done = subprocess.run(
        [
            *(sys.executable, *launcher, program, *SETTINGS),
            *(f"hydra.run.dir={folder}", f"runtime.compile_cache={cache}"),
        ],
        cwd=ROOT,
        env=inherited
        | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "PYTHONPATH": str(ROOT)}
        | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
    )
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, cache):
    """The curve of the run on four devices of one process, with no flipped bit."""
    folder = tmp_path_factory.mktemp("undisturbed")
    code, said = train(folder, cache)
    assert code == 0, said
    assert "step 6 is verified: equal bits on other devices" in said
    return steps_of(folder)


def steps_of(folder: Path) -> list[dict]:
    return [line for line in curve(folder) if "loss" in line]


@pytest.mark.full
def test_the_devices_of_one_of_two_processes_are_named_and_both_go_back(
    undisturbed, cache, tmp_path
):
    code, said = train(
        *(tmp_path, cache, *LAUNCHER), FLIPPED_CALLS="6", FLIPPED_POSITION="3"
    )
    assert code == 0, said
    assert "values differ on device" in said
    (line,) = {
        line.split("] ", 1)[1]
        for line in said.splitlines()
        if "values differ on device" in line
    }
    # Two devices of a process: there is no third order to tell which is wrong.
    assert line.count("of process 1") == 2
    assert "process 0" not in line
    assert "set back from step 6 to the checkpoint of step 2" in said
    assert steps_of(tmp_path) == undisturbed


@pytest.mark.full
def test_the_second_time_both_processes_end_with_code_74(cache, tmp_path):
    code, said = train(
        *(tmp_path, cache, *LAUNCHER), FLIPPED_CALLS="6,10", FLIPPED_POSITION="1"
    )
    assert code == 74, said
    assert "T716" in said
    assert "of process 0" in said


@pytest.mark.full
@pytest.mark.parametrize(
    "place",
    [
        "tessera.training.checkpoints.checkpoint_folder:quarantine",
        "tessera.training.checkpoints.saving:Checkpoints.set_back",
        "tessera.training.metrics:MetricWriter.set_back",
    ],
    ids=["one checkpoint renamed", "before the metrics", "after the metrics"],
)
def test_a_run_that_is_killed_as_it_goes_back_goes_on_to_the_same_curve(
    place, undisturbed, cache, tmp_path
):
    environ = {"FLIPPED_CALLS": "6", "FLIPPED_POSITION": "2", "KILLED_AFTER": place}
    code, said = train(tmp_path, cache, **environ)
    assert code == -signal.SIGKILL, said
    assert "values differ on device 2" in said
    code, said = train(tmp_path, cache)
    assert code == 0, said
    assert steps_of(tmp_path) == undisturbed
