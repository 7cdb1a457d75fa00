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

from tessera.training.checkpoints.folder import complete_steps, read_checkpoint

ROOT = Path(__file__).parents[2]
SMALL = (
    *("runtime.platform=cpu", "data=synthetic", "data.synthetic.tokens=20000"),
    *("model.d_model=32", "model.num_layers=2", "model.num_heads=2"),
    *("model.num_kv_heads=1", "model.head_dim=16", "model.mlp_dim=64"),
    *("training.sequence_length=16", "training.sample_length=0"),
    *("training.checkpoint_every=0", "data.validation_fraction=0"),
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


@pytest.mark.slow
def test_a_run_goes_on_in_two_processes_and_then_in_four(tmp_path):
    run(tmp_path / "whole", 1, 9)
    folder = tmp_path / "run"
    run(folder, 1, 3)
    for processes, steps in ((2, 6), (4, 9)):
        said = run(folder, processes, steps, "training.resume=auto")
        assert f"going on from {folder}/checkpoints/{steps - 3}, at row " in said
        assert f"at row {8 * (steps - 3)}" in said
    whole, parts = losses(tmp_path / "whole"), losses(folder)
    assert [line["step"] for line in parts] == [*range(1, 10)]
    assert [line["loss"] for line in parts[:3]] == [line["loss"] for line in whole[:3]]
    for alone, together in zip(whole, parts, strict=True):
        # Sums over devices are made in another order.
        assert together["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        assert together["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-4)
    root = folder / "checkpoints"
    assert complete_steps(root) == [9, 6, 3]
    written = [read_checkpoint(root / str(step)).metadata for step in (3, 6, 9)]
    assert [metadata.processes for metadata in written] == [1, 2, 4]
    assert [metadata.cursor.rows for metadata in written] == [24, 48, 72]
    assert len({metadata.cursor.order["shuffle"] for metadata in written}) == 1
