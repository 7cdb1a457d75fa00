# SPDX-License-Identifier: Apache-2.0
"""Runs that are asked to end save, exit with a code of their own, and go on exactly."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tessera.train.checkpoints.checkpoint_folder import (
    complete_steps,
    read_checkpoint,
)
from tests.curves import curve
from tests.faults.trainer import PROGRAM, ROOT, environ, train_here
from tests.faults.trainer import SMALL as SMALLEST

NOTICED = Path(__file__).parent / "noticed_run.py"
PATIENT = Path(__file__).parent / "patient_run.py"
LIMIT = 120.0
STEPS = 96
LAUNCHER = (
    "-m",
    "tessera.train.commands.launch",
    "--nprocs=2",
    "--grace=60",
    "--max-restarts=1",
)
BASE = (*SMALLEST, "model.mesh_shape=[[2],[fsdp]]", f"training.steps={STEPS}")
SMALL = (
    *(*BASE, "data.synthetic.tokens=60000"),
    *("data.validation_fraction=0.3", "training.validation_sequences=480"),
    *(f"training.validate_every={STEPS // 2}", "training.resume=auto"),
    *("training.checkpoint_every=0", "runtime.grace_period=50"),
)


class Running:
    """A program in a process of its own."""

    def __init__(self, *command: str) -> None:
        self.said = ""
        self.process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=environ(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def read_until(self, pattern: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said += line
            if re.search(pattern, line):
                return
        raise AssertionError(f"{pattern!r} was not said: {self.said}")

    def finish(self, code: int = 0) -> str:
        """Everything that it said, once it ends by itself."""
        said, _ = self.process.communicate(timeout=LIMIT)
        self.said += said
        assert self.process.returncode == code, self.said
        assert "Traceback" not in self.said
        return self.said

    def rank(self, local_rank: int) -> int:
        """The process of a rank, of a launcher."""
        pid = self.process.pid
        return int(
            Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[local_rank]
        )


Start = Callable[..., Running]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts programs, and kills those that are left, a launcher's ranks with it."""
    running: list[Running] = []

    def begin(*command: str) -> Running:
        running.append(Running(*command))
        return running[-1]

    yield begin
    for one in running:
        one.process.kill()
        one.process.communicate(timeout=LIMIT)


@pytest.fixture
def train(start: Start) -> Start:
    """Starts or resumes the run in a folder."""

    def begin(folder: Path, *arguments: str, launcher: tuple[str, ...] = ()) -> Running:
        given = (f"hydra.run.dir={folder}", *arguments)
        return start(*launcher, PROGRAM, *SMALL, *given)

    return begin


# Says that it has saved and is about to end, which takes it a second then.
LEAVING = """
import sys, time
from tessera.train.runtime.process_exit import on_exit
from tessera.train.loop.main import main

def leave():
    print("leaving", flush=True)
    time.sleep(1)

with on_exit(leave):
    sys.exit(main())
"""


@pytest.mark.full
def test_a_signal_to_a_run_that_has_saved_does_not_change_its_code(start, tmp_path):
    """Slurm signals the tasks that are left as soon as one has ended."""
    run = start("-c", LEAVING, *BASE, f"hydra.run.dir={tmp_path / 'run'}")
    run.read_until(r"step 3/")
    run.process.send_signal(signal.SIGTERM)
    run.read_until("leaving")
    run.process.send_signal(signal.SIGTERM)
    run.finish(75)


def stopped_after(said: str, ranks: int) -> int:
    """The step after which all ranks say that the run is stopped."""
    steps = re.findall(rf"stopped after step (\d+) of {STEPS}", said)
    assert len(steps) == ranks
    assert len(set(steps)) == 1
    return int(steps[0])


@pytest.mark.full
def test_a_run_that_is_asked_to_end_goes_on_bit_for_bit(train, start, tmp_path):
    """One run, asked four times; a sum of two devices has one order."""
    folder, whole = tmp_path / "parts", tmp_path / "whole"
    root = folder / "checkpoints"
    assert train_here(*SMALL, f"hydra.run.dir={whole}") == 0

    # Rank 1 alone is told that its machine goes, in a step: both save the same one, and
    # are not restarted.
    given = (*SMALL, f"hydra.run.dir={folder}", "runtime.preemption_notice=gce")
    said = start(*LAUNCHER, str(NOTICED), *given).finish(75)
    cause = "Google Cloud preempts this machine: the run is to save and end, in 50 s"
    assert said.count(cause) == 1
    assert "the run is to save and end: rank 1 is asked to" in said
    assert "[launch] all ranks ended as asked: exit code 75" in said
    assert "restart" not in said
    assert complete_steps(root) == [step := stopped_after(said, 2)]
    assert 6 <= step < STEPS // 2

    # One of two ranks gets a signal in an evaluation: it is cut short on both, and the
    # step before it saved.
    run = train(folder, launcher=LAUNCHER)
    run.read_until(rf"rank 0.* step {STEPS // 2}/")
    os.kill(run.rank(1), signal.SIGTERM)
    said = run.finish(75)
    assert f"resuming from {root}/{step}" in said
    assert "the run is to save and end: rank 1 is asked to" in said
    assert "restart" not in said
    assert stopped_after(said, 2) == STEPS // 2
    saved = read_checkpoint(root / str(STEPS // 2)).metadata
    assert saved.processes == 2
    assert not saved.is_validated

    # A process that compiles: there is nothing to save.
    run = train(folder)
    run.read_until("compiling the step")
    run.process.send_signal(signal.SIGTERM)
    said = run.finish(75)
    assert "SIGTERM: nothing is to be saved before the first step" in said
    assert "validation after" not in said

    # Ctrl-C while checkpoints are written, after the evaluation that was cut short.
    run = train(folder, "training.checkpoint_every=1", "training.keep=100")
    run.read_until(rf"step {STEPS // 2 + 6}/")
    run.process.send_signal(signal.SIGINT)
    said = run.finish(130)
    assert f"validation after step {STEPS // 2}: " in said
    assert "SIGINT: the run is to save and end; a second one ends it at once" in said
    step = stopped_after(said, 1)
    assert f"the last complete checkpoint is {root}/{step}" in said
    assert complete_steps(root)[0] == step < STEPS

    assert train_here(*SMALL, f"hydra.run.dir={folder}") == 0
    assert curve(folder) == curve(whole)


@pytest.mark.full
def test_a_time_limit_that_is_over_before_the_first_step_stops_both_ranks(
    start, tmp_path
):
    given = (*BASE, f"hydra.run.dir={tmp_path / 'run'}", "runtime.max_run_time=0.5")
    said = start(*LAUNCHER, PROGRAM, *given).finish(75)
    assert "runtime.max_run_time=0.5 is over: nothing is to be saved before" in said
    assert "restart" not in said


def is_importing(pid: int) -> bool:
    """Whether a process has loaded a part of JAX, which others follow."""
    try:
        return "/jaxlib/" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 75),
        pytest.param(signal.SIGUSR2, 75, marks=pytest.mark.full),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.full),
    ],
)
def test_one_that_still_imports_ends_as_asked(start, tmp_path, number, code):
    run = start(PROGRAM, f"hydra.run.dir={tmp_path / 'run'}")
    deadline = time.monotonic() + LIMIT
    while not is_importing(run.process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    run.process.send_signal(number)
    run.finish(code)
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_ranks_that_still_import_end_as_asked_and_are_not_started_again(start):
    """From the first instruction of their processes on."""
    for pause in (0.0, 0.02, 0.2, 1.0):
        run = start(*LAUNCHER, PROGRAM)
        run.read_until("starting ranks")
        time.sleep(pause)
        run.process.send_signal(signal.SIGTERM)
        said = run.finish(75)
        assert "[launch] all ranks ended as asked: exit code 75" in said
        assert "restart" not in said


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing ends it")
@pytest.mark.parametrize("where", ["hold", "linger"])
def test_one_whose_threads_do_not_run_ends_with_its_grace_period(start, where):
    """By the deadline: three seconds later, if not by itself."""
    run = start(str(PATIENT), "2", where)
    run.read_until("waiting")
    run.process.send_signal(signal.SIGTERM)
    said = run.finish(75)
    assert ("stopped" in said) == (where == "linger")


@pytest.mark.full
def test_one_that_does_not_get_to_its_next_step_ends_with_its_grace_period(start):
    run = start(str(PATIENT), "2", "call")
    run.read_until("waiting")
    run.process.send_signal(signal.SIGTERM)
    run.process.send_signal(signal.SIGTERM)  # of a scheduler and of a launcher
    # Without the grace period it would end in a hundred hours.
    assert "SIGTERM: rank 0 did not end in 2 s" in run.finish(75)


def test_a_second_signal_ends_a_run_at_once(start):
    run = start(str(PATIENT), "600", "call")
    run.read_until("waiting")
    run.process.send_signal(signal.SIGTERM)
    run.read_until("a second one ends it at once")
    run.process.send_signal(signal.SIGINT)
    said = run.finish(130)
    assert "a second signal, SIGINT: rank 0 ends at once" in said
