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

from tessera.training.checkpoints.checkpoint_folder import (
    complete_steps,
    read_checkpoint,
)

ROOT = Path(__file__).parents[2]
SMALL = (
    *("runtime.platform=cpu", "data=synthetic", "data.synthetic.tokens=20000"),
    *("model.d_model=32", "model.num_layers=2", "model.num_heads=2"),
    *("model.num_kv_heads=1", "model.head_dim=16", "model.mlp_dim=64"),
    *(
        "training.sequence_length=16",
        "training.sample_length=0",
        "training.report=false",
    ),
    *("training.checkpoint_every=3", "data.validation_fraction=0"),
    *("optimizer.schedule=constant", "optimizer.warmup_steps=1"),
)


def run(folder: Path, processes: int, steps: int, *arguments: str) -> str:
    """What a run of eight rows a step says, in so many processes of one device."""
    launcher = ("-m", "tessera.launch", f"--nprocs={processes}", "--grace=5")
    process = subprocess.Popen(
        [
            *(sys.executable, *(launcher if processes > 1 else ()), "run_training.py"),
            *SMALL,
            *(f"training.steps={steps}", f"hydra.run.dir={folder}"),
            f"model.mesh_shape=[[{processes}],[fsdp]]",
            f"training.micro_batch_size={8 // processes}",
            *arguments,
        ],
        cwd=ROOT,
        env={
            **{k: v for k, v in os.environ.items() if not k.startswith("JAX_")},
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        },
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
    run(whole, 1, 9)
    # The run that is in one process up to its third step is that one.
    start = f"training.resume={whole}/checkpoints/3"
    assert f"resuming from {whole}/checkpoints/3, at row 24" in run(folder, 2, 6, start)
    said = run(folder, 4, 9, "training.resume=auto")
    assert f"resuming from {folder}/checkpoints/6, at row 48" in said
    alone, together = losses(whole)[3:], losses(folder)
    assert [line["step"] for line in together] == [*range(4, 10)]
    for one, other in zip(alone, together, strict=True):
        # Sums over devices are made in another order.
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
    written = [
        read_checkpoint(root / "checkpoints" / str(step)).metadata
        for root, step in ((whole, 3), (folder, 6), (folder, 9))
    ]
    assert complete_steps(folder / "checkpoints") == [9, 6]
    assert [metadata.processes for metadata in written] == [1, 2, 4]
    assert [metadata.cursor.rows for metadata in written] == [24, 48, 72]
    assert len({metadata.cursor.order["shuffle"] for metadata in written}) == 1
