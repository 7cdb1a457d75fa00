# SPDX-License-Identifier: Apache-2.0
"""``run_training.py`` in two processes is the run that it is in one."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = (
    "runtime.platform=cpu",
    "data=synthetic",
    "model.num_layers=2",
    "model.mesh_shape=[[2,2],[fsdp,tp]]",
    "training.steps=4",
    "training.sequence_length=32",
    "training.micro_batch_size=2",
    "training.gradient_accumulation_steps=2",
    "training.validation_batches=1",
    "training.sample_length=3",
)


def run(folder: Path, *command: str) -> tuple[str, list[dict]]:
    """What a run writes to its log and to ``metrics.jsonl``."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    # Half the time to compile; the partitioning and the collectives are the same.
    environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    ended = subprocess.run(
        [sys.executable, *command, *SMALL, f"hydra.run.dir={folder}"],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return ended.stdout, [json.loads(line) for line in lines]


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one(tmp_path):
    _, one = run(tmp_path / "one", "run_training.py")
    launcher = ("-m", "tessera.launch", "--nprocs=2", "--grace=5", "run_training.py")
    said, two = run(tmp_path / "two", *launcher)
    assert len(one) == len(two) == 5
    for alone, together in zip(one, two, strict=True):
        names = {name for name in alone if "loss" in name or name == "grad_norm"}
        assert names
        for name in names:
            assert together[name] == pytest.approx(alone[name], rel=1e-6), name
    assert "simulating 4 CPU devices in 2 processes" in said
    # One folder, which rank 0 alone wrote.
    written = re.findall(r"\[rank (\d)\] .*the run is in (.*)", said)
    assert sorted(written) == [(rank, str(tmp_path / "two")) for rank in "01"]
    log = (tmp_path / "two/train.log").read_text()
    assert "rank 0 of 2, by tessera.launch" in log
    assert "rank 1 of 2" not in log
