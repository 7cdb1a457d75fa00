# SPDX-License-Identifier: Apache-2.0
"""Runs that are killed, and go on: ``run_training.py`` in processes of its own.

    TESSERA_KILLS=30 python -m pytest tests/faults/test_resume.py -n0 -s -k random_times

is the long form of what the suite does with two kills.
"""

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

from tessera.train.checkpoints.checkpoint_folder import (
    Checkpoint,
    complete_steps,
    read_checkpoint,
)
from tests.curves import curve
from tests.faults.trainer import PROGRAM, environ, train_here

KILLS = int(os.environ.get("TESSERA_KILLS", "2"))
# Long enough for any machine; what hangs is ended.
LIMIT = 300.0
STEPS = 12

BASE = (
    *("model.d_model=32", "model.num_heads=2", "model.num_kv_heads=1"),
    *("model.head_dim=16", "model.mlp_dim=64", "data=synthetic"),
    *("data.synthetic.tokens=20000", "data.synthetic.vocab_size=64"),
    *("training.sequence_length=16", "training.micro_batch_size=4"),
    *(
        "training.sample_length=0",
        "training.report=false",
        "training.log_every=1",
        "optimizer.warmup_steps=4",
    ),
)
SMALL = (
    *(*BASE, "model.num_layers=2", f"training.steps={STEPS}"),
    *("training.validate_every=4", "training.validation_sequences=8"),
    *("training.checkpoint_every=1", "training.keep=2"),
)
# What ``make test`` runs: quick to compile.
SHORT = (
    *(*BASE, "model.num_layers=1", "training.steps=8", "data.validation_fraction=0"),
    *("optimizer=sgd", "training.keep=3", "training.resume=auto"),
)


class Run:
    """``run_training.py`` in a process of its own, with a small model."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        largest_file: int = -1,
        settings: tuple[str, ...] = SMALL,
    ) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [
                *(sys.executable, PROGRAM, *settings),
                *(f"hydra.run.dir={folder}", *arguments),
            ],
            cwd=folder.parent,
            env=environ(),
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

    def read_until(self, text: str) -> str:
        """The first line that a pattern is in; nothing where it ends before."""
        assert self.process.stdout is not None
        return next((line for line in self.process.stdout if re.search(text, line)), "")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate(timeout=LIMIT)

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"


Start = Callable[..., Run]


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    """Starts runs, and kills those that are left."""
    runs: list[Run] = []

    def begin(folder: Path, *arguments: str, **options: Any) -> Run:
        runs.append(Run(folder, *arguments, **options))
        return runs[-1]

    yield begin
    for run in runs:
        if run.process.poll() is None:
            run.kill()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happens to; it keeps no checkpoint but the last."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    resume(folder, "training.checkpoint_every=0")
    assert complete_steps(folder / "checkpoints") == [STEPS]
    return folder


def resume(folder: Path, *arguments: str) -> str:
    """What a run logs that goes on in this process to its end."""
    given = ("training.resume=auto", f"hydra.run.dir={folder}", *arguments)
    assert train_here(*SMALL, *given) == 0
    return (folder / "train.log").read_text()


@pytest.fixture(scope="module")
def uninterrupted(whole: Path) -> list[dict[str, Any]]:
    """The curve of a run that nothing happens to."""
    lines = curve(whole)
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
MOMENTS = {
    "compile": "compiling the step",
    "evaluation": "step 4/",
    "save": "step 8/",
}


@pytest.fixture(scope="module")
def killed(start, tmp_path_factory) -> Path:
    """The folder of a run that is killed after two checkpoints."""
    folder = tmp_path_factory.mktemp("killed") / "run"
    run = start(folder, "training.checkpoint_every=1", settings=SHORT)
    run.kill_at("the checkpoint of step 2 is complete")
    return folder


def test_a_kill_leaves_the_newest_checkpoint_complete(killed):
    newest = complete_steps(killed / "checkpoints")[0]
    assert 2 <= newest < 8
    checkpoint = read_checkpoint(killed / f"checkpoints/{newest}")
    assert isinstance(checkpoint, Checkpoint), checkpoint


@pytest.fixture(scope="module")
def resumed(killed, start, tmp_path_factory) -> tuple[Path, str]:
    """A copy of it without the newest checkpoint, which goes on, and what it says."""
    folder = tmp_path_factory.mktemp("resumed") / "run"
    shutil.copytree(killed, folder)
    shutil.rmtree(
        folder / "checkpoints" / str(complete_steps(killed / "checkpoints")[0])
    )
    never = "training.checkpoint_every=0"
    return folder, start(folder, never, settings=SHORT).finish()


def test_a_killed_run_resumes_bit_for_bit(killed, resumed):
    """Its steps before the kill, of which some are taken again, are the reference."""
    folder, said = resumed
    newest, older, *_ = complete_steps(killed / "checkpoints")
    before = curve(killed)
    assert len(before) >= newest > older
    checkpoint = folder / "checkpoints" / str(older)
    assert f"resuming from {checkpoint}, at row {4 * older}" in said
    after = curve(folder)
    assert [line["step"] for line in after if "loss" in line] == [*range(1, 9)]
    assert after[: len(before)] == before


@pytest.mark.full
def test_a_run_that_is_killed_at_each_of_its_moments_goes_on_bit_for_bit(
    start, uninterrupted, tmp_path
):
    """And a bit of what it has saved last is flipped before it is started again.

    In a step, ``test_a_killed_run_resumes_bit_for_bit`` kills one.
    """
    folder, newest = tmp_path / "run", 0
    for moment in MOMENTS.values():
        run = start(folder, "training.resume=auto")
        assert begins_at(run, newest)
        run.kill_at(moment)
        newest = assert_latest_is_readable(run)
    before = complete_steps(run.checkpoints)[1]
    damaged = flip_a_bit(run.checkpoints / str(newest))
    said = resume(folder)
    assert f"THE CHECKPOINT OF STEP {newest} IS DAMAGED: {damaged} is not" in said
    assert f"resuming from {run.checkpoints / str(before)}, at row {4 * before}" in said
    assert (run.checkpoints / f"{newest}.damaged").is_dir()
    assert curve(folder) == uninterrupted


def begins_at(run: Run, step: int) -> bool:
    """Whether a run says that it begins at a step, before it compiles."""
    if not step:
        return "the run starts at step 0" in run.read_until("starts at|resuming")
    place = run.checkpoints / str(step)
    return f"resuming from {place}, " in run.read_until("starts at|resuming")


def flip_a_bit(checkpoint: Path) -> str:
    """The name of the file that is damaged: the longest one."""
    files = [path for path in checkpoint.rglob("*") if path.is_file()]
    longest = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(longest.read_bytes())
    content[len(content) // 2] ^= 1
    longest.write_bytes(content)
    return longest.relative_to(checkpoint).as_posix()


@pytest.mark.full
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
            for _ in range(draw.randint(1, 6)):
                run.read_until(r"step \d+/")
            time.sleep(draw.uniform(0, 0.3))
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
        resume(folder)
        assert curve(folder) == uninterrupted


@pytest.mark.full
def test_other_data_is_refused_before_anything_is_written(refuse, whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "run")
    given = (f"hydra.run.dir={folder}", "training.resume=auto", "training.seed=1")
    said = refuse(*SMALL, *given)
    assert said.startswith(
        "[T803] the run cannot continue at row 48: its data has changed"
    )
    assert "training.seed: 0 -> 1" in said


# --- disks


@pytest.mark.full
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
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.full
def test_a_disk_that_fills_up_keeps_the_last_checkpoint_and_the_run(
    start, uninterrupted, small_disk
):
    """There is room for one checkpoint of 370 KiB and the log, not for two."""
    folder, ballast = small_disk / "run", small_disk / "ballast"
    ballast.write_bytes(bytes(shutil.disk_usage(small_disk).free - 600 * 1024))
    said = start(folder, "training.checkpoint_every=2", "training.keep=1").finish(2)
    assert "step 12/12" in said
    checkpoints = folder / "checkpoints"
    for step in (4, 6, 8, 10, 12):
        assert f"{checkpoints / str(step)}: " in said
    # Once for each that fails, and once at the end.
    assert said.count(f"the last complete checkpoint is {checkpoints / '2'}") == 6
    assert said.rstrip().splitlines()[-4].startswith("[T804] a checkpoint cannot be")
    assert not re.search("Traceback|never awaited|asyncio", said)
    assert [path.name for path in checkpoints.iterdir()] == ["2"]
    ballast.unlink()
    resume(folder, "training.checkpoint_every=2")
    assert curve(folder) == uninterrupted


@pytest.mark.full
def test_files_that_may_not_grow_are_said_and_leave_nothing(start, tmp_path):
    """The same as a full disk where nothing can be mounted: no file above 64 KiB."""
    folder = tmp_path / "run"
    run = start(
        *(folder, "training.checkpoint_every=2", "training.steps=3"),
        "training.validate_every=0",
        largest_file=1 << 16,
    )
    said = run.finish(2)
    assert "step 3/3" in said
    assert "there is no complete checkpoint of this run yet" in said
    assert not re.search("Traceback|never awaited|asyncio", said)
    assert said.rstrip().splitlines()[-4].startswith("[T804] a checkpoint cannot be")
    assert list(run.checkpoints.iterdir()) == []
