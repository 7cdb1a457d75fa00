# SPDX-License-Identifier: Apache-2.0
"""``model.mesh_shape=auto`` in several processes, and in fewer when the run goes on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.curves import curve

ROOT = Path(__file__).parents[2]
LIMIT = 240.0
SETTINGS = (
    *("model.d_model=32", "model.num_layers=1", "model.num_heads=2"),
    *("model.num_kv_heads=1", "model.head_dim=16", "model.mlp_dim=32"),
    *("runtime.platform=cpu", "training.resume=auto", "training.checkpoint_every=4"),
    *("data=synthetic", "data.synthetic.tokens=20000", "data.synthetic.vocab_size=64"),
    *("training.sequence_length=16", "training.validate_every=0"),
    *("training.sample_length=0", "training.report=false", "training.log_every=1"),
    # A constant rate: the run is a longer one when it goes on.
    *("optimizer.warmup_steps=0", "optimizer.schedule=constant"),
)


def train(folder: Path, *words: str, launcher: tuple[str, ...] = ()) -> list[list[int]]:
    """Train in a folder, and return the mesh that its record has."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    done = subprocess.run(
        [
            *(sys.executable, *launcher, "run_training.py", *SETTINGS, *words),
            *("training.global_batch_size=8", f"hydra.run.dir={folder}"),
        ],
        cwd=ROOT,
        env=inherited | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stdout
    config = yaml.safe_load((folder / "config.yaml").read_text())
    return config["model"]["mesh_shape"]


@pytest.mark.full
def test_a_run_goes_on_with_the_processes_that_are_there(tmp_path):
    auto, elastic = "model.mesh_shape=auto", tmp_path / "elastic"
    launcher = ("-m", "tessera.launch", "--nprocs=2")
    sizes, _ = train(elastic, auto, "training.steps=4", launcher=launcher)
    assert sorted(sizes)[-1] == 2
    sizes, _ = train(elastic, auto, "training.steps=8")
    assert {*sizes} == {1}
    train(tmp_path / "whole", "model.mesh_shape=[[1],[fsdp]]", "training.steps=8")
    lines = [
        [line["loss"] for line in curve(folder) if "loss" in line]
        for folder in (elastic, tmp_path / "whole")
    ]
    # Sums of two devices are rounded otherwise; other rows have another loss by far.
    assert lines[0] == pytest.approx(lines[1], rel=1e-4)
    assert len(lines[0]) == 8
