# SPDX-License-Identifier: Apache-2.0
"""``run_training.py`` in two processes is the run that it is in one."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.curves import curve
from tests.faults.trainer import PROGRAM, SMALL, environ, train_here

SETTINGS = (
    *(*SMALL, "model.num_kv_heads=2", "model.mesh_shape=[[2,2],[fsdp,tp]]"),
    *("training.micro_batch_size=2", "training.gradient_accumulation_steps=2"),
    *("training.steps=4", "training.checkpoint_every=2"),
)
LAUNCHER = (
    "-m",
    "tessera.train.commands.launch",
    "--nprocs=2",
    "--grace=5",
    "--max-restarts=1",
)


def run(
    folder: Path, *command: str, watch: Callable[[int, str], None] | None = None
) -> tuple[str, list[dict]]:
    """What a run says, and what it writes to ``metrics.jsonl``.

    Args:
      folder: Its folder.
      command: The program and its flags.
      watch: Takes the process's number and each line that it says.
    """
    started = subprocess.Popen(
        [sys.executable, *command, *SETTINGS, f"hydra.run.dir={folder}"],
        env=environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    # The launcher's ranks end with it.
    limit = threading.Timer(240, started.kill)
    limit.start()
    said: list[str] = []
    try:
        assert started.stdout is not None
        with started.stdout as lines:
            for line in lines:
                said.append(line)
                if watch is not None:
                    watch(started.pid, line)
        code = started.wait(timeout=240)
    finally:
        limit.cancel()
        started.kill()
        started.wait()
    assert code == 0, "".join(said)
    written = (folder / "metrics.jsonl").read_text().splitlines()
    return "".join(said), [json.loads(line) for line in written]


def numbers(lines: list[dict]) -> list[dict[str, float]]:
    """What of the metrics does not depend on the time."""
    return [
        {name: v for name, v in line.items() if "loss" in name or name == "grad_norm"}
        for line in lines
    ]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """The numbers of one process with four devices."""
    folder = tmp_path_factory.mktemp("one")
    assert train_here(*SETTINGS, f"hydra.run.dir={folder}") == 0
    return numbers(curve(folder))


@pytest.mark.full
def test_two_processes_of_which_one_is_killed_give_the_numbers_of_one(tmp_path, alone):
    """``kill -9`` of one of two ranks after the first checkpoint; both start again."""
    killed: list[int] = []

    def kill(launcher: int, line: str) -> None:
        if "the checkpoint of step 2 is complete" in line and not killed:
            killed.append(ranks_of(launcher)[-1])
            os.kill(killed[0], signal.SIGKILL)

    said, lines = run(tmp_path / "run", *LAUNCHER, PROGRAM, watch=kill)
    assert killed
    assert "killed by SIGKILL in phase" in said
    assert "[launch] restart 1 of 1\n" in said
    assert f"resuming from {tmp_path / 'run/checkpoints'}" in said
    # The first steps are of the first two processes, the others of the next two.
    assert len(lines) == len(alone) == 4
    assert numbers(lines) == [pytest.approx(line, rel=1e-6) for line in alone]
    assert "simulating 4 CPU devices in 2 processes" in said
    # One folder, which rank 0 alone wrote, as it alone shows what the run does.
    shown = re.findall(r"\[rank (\d)\] .*(?:step \d/|the run is in)", said)
    assert {*shown} == {"0"}
    for log in ("train.log", "train.1.log"):
        text = (tmp_path / "run" / log).read_text()
        assert "rank 0 of 2, by tessera launch" in text
        assert "rank 1 of 2" not in text


def ranks_of(launcher: int) -> list[int]:
    """The processes that a launcher has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            if stat.read_text().rpartition(")")[2].split()[1] == str(launcher):
                found.append(int(stat.parent.name))
    return sorted(found)
