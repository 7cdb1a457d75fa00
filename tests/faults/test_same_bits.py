# SPDX-License-Identifier: Apache-2.0
"""``training.numerics=deterministic`` of ``run_training.py``: the same bits, again, on
any mesh and in any number of microbatches.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tessera.training import train
from tessera.training.command_line import run_from_command_line
from tests.curves import curve

ROOT = Path(__file__).parents[2]
ROWS = 8
SMALL = (
    *("model.d_model=32", "model.num_layers=1", "model.num_heads=2"),
    *("model.num_kv_heads=1", "model.head_dim=16", "model.mlp_dim=32"),
    *("data=synthetic", "data.synthetic.tokens=20000", "data.synthetic.vocab_size=64"),
    *(
        "training.sequence_length=16",
        "training.steps=4",
        "training.sample_length=0",
        "training.report=false",
    ),
    *("training.validation_batches=1", "training.checkpoint_every=null"),
    *("optimizer.warmup_steps=0", "training.numerics=deterministic"),
)


def arguments(folder: Path, devices: int, *others: str) -> list[str]:
    return [
        *(*SMALL, f"model.mesh_shape=[[{devices}],[dp]]", f"hydra.run.dir={folder}"),
        *(f"training.micro_batch_size={ROWS // devices}", *others),
    ]


@pytest.mark.full
def test_runs_on_one_two_and_four_devices_and_another_process_have_the_same_bits(
    tmp_path, capsys
):
    found = {}
    for devices in (1, 2, 4):
        folder = tmp_path / f"on {devices}"
        given = arguments(folder, devices)
        code = run_from_command_line(train.run, ROOT / "configs", given)
        assert code == 0, capsys.readouterr().err
        found[devices] = curve(folder)
    # Again, by a compiler that knows nothing of the first time.
    subprocess.run(
        [sys.executable, str(ROOT / "run_training.py"), *arguments(tmp_path / "b", 2)],
        env=os.environ
        | {"JAX_NUM_CPU_DEVICES": "8", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        check=True,
        capture_output=True,
        timeout=300,
    )
    assert [line["step"] for line in found[1]] == [1, 2, 3, 4, 4]
    assert len({line["loss"] for line in found[1][:4]}) == 4
    assert found[2] == found[1]
    assert found[4] == found[1]
    assert curve(tmp_path / "b") == found[2]


@pytest.mark.full
def test_a_run_in_two_processes_has_the_bits_of_one_device(tmp_path, capsys):
    code = run_from_command_line(
        train.run, ROOT / "configs", arguments(tmp_path / "one", 1)
    )
    assert code == 0, capsys.readouterr().err
    subprocess.run(
        [
            *(sys.executable, "-m", "tessera.launch", "--nprocs=2", "run_training.py"),
            *arguments(tmp_path / "two", 2, "runtime.platform=cpu"),
        ],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
        | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        check=True,
        capture_output=True,
        timeout=300,
    )
    assert curve(tmp_path / "two") == curve(tmp_path / "one")


@pytest.mark.full
@pytest.mark.parametrize(
    ("mesh", "rows", "microbatches"),
    [("[[2,2],[pp,tp]]", 4, 2), ("[[2,2],[dp,cp]]", 1, 4)],
)
def test_a_run_on_other_axes_and_in_several_microbatches_has_the_same_losses(
    tmp_path, capsys, mesh, rows, microbatches
):
    divided = [
        *(f"model.mesh_shape={mesh}", f"training.micro_batch_size={rows}"),
        f"training.gradient_accumulation_steps={microbatches}",
    ]
    found = []
    for folder, others in (tmp_path / "whole", []), (tmp_path / "divided", divided):
        given = arguments(folder, 1, "model.num_layers=2", *others)
        code = run_from_command_line(train.run, ROOT / "configs", given)
        assert code == 0, capsys.readouterr().err
        found.append(curve(folder))
    assert len({line["loss"] for line in found[0][:4]}) == 4
    assert found[1] == found[0]
