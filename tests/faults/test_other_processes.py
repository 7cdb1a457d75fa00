# SPDX-License-Identifier: Apache-2.0
"""A run that goes on in two processes, and then in four, is the run of one."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tessera.train.checkpoints.checkpoint_folder import (
    complete_steps,
    read_checkpoint,
)
from tests.faults.trainer import PROGRAM, SMALL, environ, train_here

SETTINGS = (*SMALL, "training.checkpoint_every=2")


def settings_of(folder: Path, processes: int, steps: int) -> tuple[str, ...]:
    """Those of a run of eight rows a step, in so many processes of one device."""
    return (
        *(*SETTINGS, f"training.steps={steps}", f"hydra.run.dir={folder}"),
        f"model.mesh_shape=[[{processes}],[fsdp]]",
        f"training.micro_batch_size={8 // processes}",
    )


def run(folder: Path, processes: int, steps: int, *arguments: str) -> str:
    """What a run in several processes says."""
    launcher = (
        "-m",
        "tessera.train.commands.launch",
        f"--nprocs={processes}",
        "--grace=5",
    )
    process = subprocess.Popen(
        [
            *(sys.executable, *launcher, PROGRAM),
            *(*settings_of(folder, processes, steps), *arguments),
        ],
        env=environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=240)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, said
    return said


def losses(folder: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "loss" in line]


@pytest.mark.full
def test_a_run_goes_on_in_two_processes_and_then_in_four(tmp_path):
    whole, folder = tmp_path / "whole", tmp_path / "run"
    assert train_here(*settings_of(whole, 1, 6)) == 0
    # The run that is in one process up to its second step is that one.
    start = f"training.resume={whole}/checkpoints/2"
    assert f"resuming from {whole}/checkpoints/2, at row 16" in run(folder, 2, 4, start)
    said = run(folder, 4, 6, "training.resume=auto")
    assert f"resuming from {folder}/checkpoints/4, at row 32" in said
    alone, together = losses(whole)[2:], losses(folder)
    assert [line["step"] for line in together] == [*range(3, 7)]
    for one, other in zip(alone, together, strict=True):
        # Sums over devices are made in another order.
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
    written = [
        read_checkpoint(root / "checkpoints" / str(step)).metadata
        for root, step in ((whole, 2), (folder, 4), (folder, 6))
    ]
    assert complete_steps(folder / "checkpoints") == [6, 4]
    assert [metadata.processes for metadata in written] == [1, 2, 4]
    assert [metadata.cursor.rows for metadata in written] == [16, 32, 48]
    assert len({metadata.cursor.order["shuffle"] for metadata in written}) == 1
