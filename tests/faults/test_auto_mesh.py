# SPDX-License-Identifier: Apache-2.0
"""``model.mesh_shape=auto`` in several processes, and in fewer when the run goes on."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.curves import curve
from tests.faults.trainer import PROGRAM, SMALL, environ, train_here

LIMIT = 240.0
# A constant rate: the run is a longer one when it goes on.
SETTINGS = (
    *(setting for setting in SMALL if "micro_batch_size" not in setting),
    *("training.resume=auto", "training.global_batch_size=8"),
)


def train(folder: Path, *words: str, launcher: tuple[str, ...] = ()) -> list[list[int]]:
    """Train in a folder, and return the mesh that its record has."""
    done = subprocess.run(
        [
            *(sys.executable, *launcher, PROGRAM, *SETTINGS, *words),
            *("model.mesh_shape=auto", f"hydra.run.dir={folder}"),
        ],
        env=environ(),
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
    elastic, whole = tmp_path / "elastic", tmp_path / "whole"
    launcher = ("-m", "tessera.train.commands.launch", "--nprocs=2")
    sizes, _ = train(elastic, "training.steps=2", launcher=launcher)
    assert sorted(sizes)[-1] == 2
    sizes, _ = train(elastic, "training.steps=4")
    assert {*sizes} == {1}
    given = ("model.mesh_shape=[[1],[fsdp]]", "training.steps=4")
    assert train_here(*SETTINGS, *given, f"hydra.run.dir={whole}") == 0
    lines = [[line["loss"] for line in curve(folder)] for folder in (elastic, whole)]
    # Sums of two devices are rounded otherwise; other rows have another loss by far.
    assert lines[0] == pytest.approx(lines[1], rel=1e-4)
    assert len(lines[0]) == 4
