# SPDX-License-Identifier: Apache-2.0
"""``--multirun``: a run for each combination of values, in a folder of its own.

That real runs start is in ``tests/test_run_training.py``.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tessera.train.config import sweep
from tessera.train.config.command_line import read_command_line
from tests.train.config.command_lines import CONFIGS_DIR


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """The arguments of each run that a sweep started; none runs."""
    runs: list[list[str]] = []

    class Process:
        def __init__(self, command: tuple[str, ...], **_: Any) -> None:
            assert command[:3] == (sys.executable, "-P", "-c")
            runs.append([*command[4:]])

        def wait(self) -> int:
            return {"training.seed=13": 3, "training.seed=75": 75}.get(runs[-1][0], 0)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep.subprocess, "Popen", Process)
    return runs


@pytest.mark.full
def test_each_combination_is_a_run_in_a_folder_of_its_own(started, tmp_path):
    given = ["-m", "training.seed=1,2", "training.steps=2", "data=synthetic,stdlib"]
    arguments = list(sys.argv)
    assert read_command_line(CONFIGS_DIR, given) == 0
    assert [run[:-1] for run in started] == [
        [f"training.seed={seed}", "training.steps=2", f"data={data}"]
        for seed in (1, 2)
        for data in ("synthetic", "stdlib")
    ]
    (sweep_dir,) = tmp_path.glob("outputs/sweeps/*/*")
    folders = [f"hydra.run.dir='{sweep_dir / str(number)}'" for number in range(4)]
    assert [run[-1] for run in started] == folders
    assert sys.argv == arguments
    saved = yaml.safe_load((sweep_dir / "multirun.yaml").read_text())
    assert "training.seed=1,2" in saved["hydra"]["overrides"]["task"]


@pytest.mark.full
def test_hydra_s_own_settings_choose_the_folder_and_the_launcher(started, tmp_path):
    given = [
        *("--multirun", "training.seed=range(3)", "hydra.sweep.dir=mine"),
        *("hydra.sweep.subdir=${hydra.job.override_dirname}", "hydra/launcher=basic"),
    ]
    assert read_command_line(CONFIGS_DIR, given) == 0
    folder = tmp_path / "mine" / "training.seed=2"
    assert started[2] == ["training.seed=2", f"hydra.run.dir='{folder}'"]


@pytest.mark.full
def test_a_sweep_ends_with_the_code_of_the_run_that_failed(started):
    assert read_command_line(CONFIGS_DIR, ["-m", "training.seed=12,13,14"]) == 3
    assert len(started) == 3


@pytest.mark.full
def test_a_run_that_is_asked_to_end_ends_the_sweep(started):
    with pytest.raises(SystemExit, match="75"):
        read_command_line(CONFIGS_DIR, ["-m", "training.seed=75,14"])
    assert len(started) == 1


@pytest.mark.parametrize(
    ("overrides", "code"),
    [
        (["training.seed=1,2", "hydra.job.chdir=true"], "T501"),
        (["training.seed=1,2", "hydra.launcher._target_=os.system"], "T502"),
        (["training.seed=1,2", "hydra/launcher=rocket"], "T502"),
        (["training.seed=1,2", "recipe=null"], "T502"),
    ],
)
def test_what_no_sweep_may_have_is_refused_before_a_run_starts(
    overrides, code, started, tmp_path, capsys
):
    assert read_command_line(CONFIGS_DIR, ["-m", *overrides]) == 2
    assert capsys.readouterr().err.startswith(f"[{code}] ")
    assert started == []
    assert list(tmp_path.iterdir()) == []


def test_a_launcher_s_process_starts_no_sweep(started, monkeypatch, capsys):
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert read_command_line(CONFIGS_DIR, ["-m", "training.seed=1,2"]) == 2
    assert capsys.readouterr().err.startswith("[T507] a sweep starts its runs itself")
    assert started == []


@pytest.mark.full
def test_a_sweep_may_be_over_recipes(started):
    assert read_command_line(CONFIGS_DIR, ["-m", "recipe=finetune,lora,none"]) == 0
    assert [run[0] for run in started] == [
        f"recipe={name}" for name in ("finetune", "lora", "none")
    ]
