# SPDX-License-Identifier: Apache-2.0
"""Runs that are killed, and go on: ``run_training.py`` in processes of its own.

    TESSERA_KILLS=30 python -m pytest tests/faults/test_resume.py -n0 -s -k random_times

is the long form of what the suite does with three kills.
"""

import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tessera.training.checkpoints.folder import (
    Checkpoint,
    complete_steps,
    read_checkpoint,
)
from tessera.training.checkpoints.manifest import NAME

ROOT = Path(__file__).parents[2]
KILLS = int(os.environ.get("TESSERA_KILLS", "3"))
LIMIT = 120.0
STEPS = 24

SMALL = (
    *("model.d_model=32", "model.num_layers=2", "model.num_heads=2"),
    *("model.num_kv_heads=1", "model.head_dim=16", "model.mlp_dim=64"),
    *("data=synthetic", "data.synthetic.tokens=20000", "data.synthetic.vocab_size=64"),
    *("training.sequence_length=16", "training.micro_batch_size=4"),
    *(f"training.steps={STEPS}", "training.sample_length=0", "training.log_every=1"),
    *("training.validate_every=8", "training.validation_batches=2"),
    *("training.checkpoint_every=1", "training.keep=2", "optimizer.warmup_steps=4"),
)


class Run:
    """``run_training.py`` in a process of its own, with a small model."""

    def __init__(
        self, folder: Path, cache: Path, *arguments: str, largest_file: int = -1
    ) -> None:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("JAX_", "XLA_", "PJRT_", "TESSERA_"))
        }
        self.folder = folder
        self.process = subprocess.Popen(
            [
                *(sys.executable, str(ROOT / "run_training.py"), *SMALL),
                *(f"hydra.run.dir={folder}", *arguments),
            ],
            cwd=folder.parent,
            env={
                **kept,
                "JAX_PLATFORMS": "cpu",
                "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
                "JAX_COMPILATION_CACHE_DIR": str(cache),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        # Set from outside, long before the run writes: a function that runs between
        # fork and exec would fork this process, whose JAX has threads.
        limit = (largest_file, largest_file)
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, limit)

    def finish(self, code: int = 0) -> str:
        """Everything that it says until it ends by itself."""
        said, _ = self.process.communicate(timeout=LIMIT)
        assert self.process.returncode == code, said
        return said

    def kill_at(self, text: str) -> None:
        """Kill it when it says something."""
        self.read_until(text)
        self.kill()
        assert self.process.returncode == -signal.SIGKILL, f"{text!r} came too late"

    def read_until(self, text: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if re.search(text, line):
                break

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate(timeout=LIMIT)

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"


Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts runs, and kills those that are left."""
    cache = tmp_path_factory.getbasetemp() / "compiled"
    runs: list[Run] = []

    def begin(folder: Path, *arguments: str, largest_file: int = -1) -> Run:
        runs.append(Run(folder, cache, *arguments, largest_file=largest_file))
        return runs[-1]

    yield begin
    for run in runs:
        if run.process.poll() is None:
            run.kill()


def curve(folder: Path) -> list[dict[str, Any]]:
    """What the run learnt, without what depends on the clock."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [
        {
            name: value
            for name, value in json.loads(line).items()
            if "second" not in name
        }
        for line in lines
    ]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The curve of a run that nothing happens to; it keeps no checkpoint but one."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    cache = tmp_path_factory.getbasetemp() / "compiled"
    said = Run(folder, cache, "training.checkpoint_every=0").finish()
    assert "the checkpoint of step 24 is complete" in said
    lines = curve(folder)
    assert [line["step"] for line in lines if "loss" in line] == [*range(1, STEPS + 1)]
    assert len({line["loss"] for line in lines if "loss" in line}) == STEPS
    return lines


def assert_latest_is_readable(run: Run) -> int:
    """The newest checkpoint that counts, which has to hold."""
    newest = next(iter(complete_steps(run.checkpoints)), 0)
    if newest:
        checkpoint = read_checkpoint(run.checkpoints / str(newest))
        assert isinstance(checkpoint, Checkpoint), checkpoint
    return newest


# The numbers of a step are written before it is evaluated or saved.
@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("compiling the step", id="compile"),
        pytest.param("the checkpoint of step 5 is complete", id="step"),
        pytest.param("step 8/", id="evaluation"),
        pytest.param("step 12/", id="save"),
    ],
)
def test_a_run_that_is_killed_goes_on_bit_for_bit(
    start, uninterrupted, tmp_path, moment
):
    folder = tmp_path / "run"
    run = start(folder)
    run.kill_at(moment)
    newest = assert_latest_is_readable(run)
    said = start(folder, "training.resume=auto").finish()
    if newest:
        assert f"going on from {run.checkpoints / str(newest)}" in said
    else:
        assert "the run begins at step 0" in said
    assert curve(folder) == uninterrupted


def test_kills_at_random_times_never_cost_more_than_the_last_steps(
    start, uninterrupted, tmp_path
):
    """Every step is saved, so most kills hit a save; a quarter hit the beginning."""
    draw, number = random.Random(KILLS), 0
    reached, runs = [0], [tmp_path / "run0"]
    for _ in range(KILLS):
        run = start(runs[-1], "training.resume=auto")
        if draw.random() < 0.25:
            time.sleep(draw.uniform(0, 4))
        else:
            run.read_until(r"step \d+/")
            time.sleep(draw.uniform(0, 1))
        run.kill()
        reached.append(assert_latest_is_readable(run))
        assert reached[-1] >= reached[-2]
        if reached[-1] == STEPS:
            # Nothing is left to hit: another run, from the beginning.
            number += 1
            runs.append(tmp_path / f"run{number}")
            reached.append(0)
    sys.stdout.write(f"newest checkpoint after each kill: {reached}\n")
    for folder in runs:
        start(folder, "training.resume=auto").finish()
        assert curve(folder) == uninterrupted


def test_a_damaged_checkpoint_is_said_loudly_and_the_one_before_is_used(
    start, uninterrupted, tmp_path
):
    folder = tmp_path / "run"
    run = start(folder)
    run.kill_at(r"the checkpoint of step 9 is complete")
    newest, before = complete_steps(run.checkpoints)[:2]
    files = [p for p in (run.checkpoints / str(newest)).rglob("*") if p.is_file()]
    longest = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(longest.read_bytes())
    content[len(content) // 2] ^= 1
    longest.write_bytes(content)
    said = start(folder, "training.resume=auto").finish()
    assert f"THE CHECKPOINT OF STEP {newest} IS DAMAGED: {longest.parent.name}" in (
        said.replace("state/", "").replace("ocdbt.process_0/", "")
    )
    assert f"going on from {run.checkpoints / str(before)}" in said
    assert (run.checkpoints / f"{newest}.damaged").is_dir()
    assert curve(folder) == uninterrupted


def test_other_data_is_refused_before_anything_is_written(start, tmp_path):
    folder = tmp_path / "run"
    start(folder, "training.steps=2").finish()
    before = sorted(path.name for path in folder.iterdir())
    said = start(folder, "training.resume=auto", "training.seed=1").finish(2)
    assert "[T803] the run cannot go on at row 8: its data has changed" in said
    assert "training.seed: 0 -> 1" in said
    assert sorted(path.name for path in folder.iterdir()) == before
    assert (folder / "checkpoints" / "2" / NAME).is_file()


# --- disks


def test_a_disk_without_room_for_a_checkpoint_is_said_at_step_0(start, small_disk):
    said = start(small_disk / "run", "model.mlp_dim=8192").finish(2)
    assert "[T804] there is no room for a checkpoint in" in said
    assert "compiling the step" not in said
    assert "step 1/" not in said


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of four megabytes, where one may be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("nothing can be mounted here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_fills_up_keeps_the_last_checkpoint_and_the_run(
    start, uninterrupted, small_disk
):
    folder = small_disk / "run"
    run = start(folder, "training.checkpoint_every=4", "training.keep=1")
    run.read_until("the checkpoint of step 4 is complete")
    free = shutil.disk_usage(small_disk).free
    (small_disk / "ballast").write_bytes(bytes(free - 100_000))
    said = run.finish(2)
    assert "step 24/24" in said
    for step in (8, 12, 16, 20, 24):
        assert f"{run.checkpoints / str(step)}: " in said
    # Once for each that fails, and once at the end.
    assert said.count(f"the last complete checkpoint is {run.checkpoints / '4'}") == 6
    assert said.rstrip().splitlines()[-4].startswith("[T804] a checkpoint cannot be")
    assert not re.search("Traceback|never awaited|asyncio", said)
    assert [path.name for path in run.checkpoints.iterdir()] == ["4"]
    (small_disk / "ballast").unlink()
    start(folder, "training.resume=auto", "training.checkpoint_every=4").finish()
    assert curve(folder) == uninterrupted


def test_files_that_may_not_grow_are_said_and_leave_nothing(start, tmp_path):
    """The same as a full disk where nothing can be mounted: no file above 64 KiB."""
    folder = tmp_path / "run"
    run = start(
        *(folder, "training.checkpoint_every=8", "training.steps=9"),
        largest_file=1 << 16,
    )
    said = run.finish(2)
    assert "step 9/9" in said
    assert "there is no complete checkpoint of this run yet" in said
    assert not re.search("Traceback|never awaited|asyncio", said)
    assert said.rstrip().splitlines()[-4].startswith("[T804] a checkpoint cannot be")
    assert list(run.checkpoints.iterdir()) == []
