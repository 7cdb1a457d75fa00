# SPDX-License-Identifier: Apache-2.0
"""``training.numerics=deterministic`` of ``run_training.py``: the same bits, again, on
any mesh and in any number of microbatches.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.curves import curve
from tests.faults.trainer import PROGRAM, environ, train_here

ROWS = 8
SMALL = (
    *("model.d_model=32", "model.num_layers=2", "model.num_heads=2"),
    *("model.num_kv_heads=1", "model.head_dim=16", "model.mlp_dim=32"),
    "runtime.platform=cpu",
    *("data=synthetic", "data.synthetic.tokens=20000", "data.synthetic.vocab_size=64"),
    *(
        "training.sequence_length=16",
        "training.steps=3",
        "training.sample_length=0",
        "training.report=false",
    ),
    *("training.validation_sequences=8", "training.checkpoint_every=null"),
    *("optimizer.warmup_steps=0", "training.numerics=deterministic"),
)


def arguments(folder: Path, devices: int, *others: str) -> list[str]:
    return [
        *(*SMALL, f"model.mesh_shape=[[{devices}],[dp]]", f"hydra.run.dir={folder}"),
        *(f"training.micro_batch_size={ROWS // devices}", *others),
    ]


@pytest.fixture(scope="module")
def on_one_device(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The curve of one device, in this process."""
    folder = tmp_path_factory.mktemp("one")
    assert train_here(*arguments(folder, 1)) == 0
    found = curve(folder)
    assert [line["step"] for line in found] == [1, 2, 3, 3]
    assert len({line["loss"] for line in found[:3]}) == 3
    return found


def run(*command: str, **variables: str) -> None:
    """Train in other processes, with a compiler that knows nothing of this one."""
    subprocess.run(
        [sys.executable, *command],
        env=environ(JAX_ENABLE_COMPILATION_CACHE="false", **variables),
        check=True,
        capture_output=True,
        timeout=300,
    )


@pytest.mark.full
def test_runs_on_one_and_four_devices_and_on_two_in_another_process_have_the_same_bits(
    tmp_path, on_one_device
):
    assert train_here(*arguments(tmp_path / "on 4", 4)) == 0
    run(PROGRAM, *arguments(tmp_path / "on 2", 2))
    assert curve(tmp_path / "on 4") == on_one_device
    assert curve(tmp_path / "on 2") == on_one_device


@pytest.mark.full
def test_a_run_in_two_processes_has_the_bits_of_one_device(tmp_path, on_one_device):
    launcher = ("-m", "tessera.train.commands.launch", "--nprocs=2")
    run(*launcher, PROGRAM, *arguments(tmp_path / "two", 2))
    assert curve(tmp_path / "two") == on_one_device


@pytest.mark.full
@pytest.mark.parametrize(
    ("mesh", "rows", "microbatches"),
    [("[[2,2],[pp,tp]]", 4, 2), ("[[2,2],[dp,cp]]", 1, 4)],
)
def test_a_run_on_other_axes_and_in_several_microbatches_has_the_same_losses(
    tmp_path, on_one_device, mesh, rows, microbatches
):
    divided = [
        *(f"model.mesh_shape={mesh}", f"training.micro_batch_size={rows}"),
        f"training.gradient_accumulation_steps={microbatches}",
    ]
    assert train_here(*arguments(tmp_path, 1, *divided)) == 0
    assert curve(tmp_path) == on_one_device
