# SPDX-License-Identifier: Apache-2.0
"""``model.mesh_shape=auto``: what is chosen, recorded, and kept by a resumed run."""

import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tessera.errors import PlanError, TargetError
from tessera.foundations.config_files import configs_dir
from tessera.targets.target import Target
from tessera.train.config.command_line import compose
from tessera.train.planner import auto_layout, step_time
from tessera.train.planner.auto_layout import AUTO, with_layout
from tessera.train.planner.memory_model import MARGIN
from tessera.train.planner.plan_run import plan_run
from tessera.train.planner.step_time import StepModel

ROOT = Path(__file__).parents[3]
WORDS = [
    AUTO,
    "data=synthetic",
    "training.sequence_length=32",
    "training.global_batch_size=8",
]
TARGET = "runtime.target=cpu:2"
TORCHRUN = {
    **{"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
    **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
}


def settings(words):
    return compose(words, configs_dir()).config


@pytest.fixture(scope="module")
def work():
    """The trace of the model, which neither layout nor batch changes."""
    config = settings([*WORDS[1:], "training.dry_run=true", TARGET])
    return StepModel.of(config, Target.parse("cpu:2")).work


@pytest.fixture
def traced_before(monkeypatch, work):
    monkeypatch.setattr(step_time, "workload", lambda *_: work)


@pytest.mark.full
def test_a_layout_takes_the_place_of_auto():
    words, notes = with_layout([*WORDS, TARGET])
    assert AUTO not in words
    assert TARGET not in words  # the run is on what is here
    sizes, _ = settings(words).model.mesh_shape
    assert sizes in ((2,), (1, 2), (2, 1))
    assert notes[0].startswith("model.mesh_shape=auto chose ")
    assert any(line.startswith("1  ") for line in notes)


@pytest.mark.full
@pytest.mark.usefixtures("traced_before")
def test_a_dry_run_keeps_its_target():
    words, _ = with_layout([*WORDS, TARGET, "training.dry_run=true"])
    assert TARGET in words


@pytest.mark.full
@pytest.mark.usefixtures("traced_before")
def test_what_is_written_is_kept():
    words, _ = with_layout([*WORDS, TARGET, "training.remat=full"])
    assert settings(words).training.remat == "full"


@pytest.mark.full
@pytest.mark.usefixtures("traced_before")
def test_without_a_global_batch_all_devices_have_a_microbatch():
    words, _ = with_layout([*WORDS[:3], TARGET, "training.micro_batch_size=3"])
    assert settings(words).training.global_batch_size == 6


def record(folder, *words):
    """The settings of a run with two devices, of which a folder has the record."""
    layout = ["model.mesh_shape=[[1,2],[dp,tp]]", "training.micro_batch_size=4"]
    composed = compose([*WORDS[1:], *layout, *words], configs_dir())
    (folder / "config.yaml").write_text(composed.text)
    return composed.config


@pytest.mark.parametrize("place", ["", "checkpoints", "checkpoints/5"])
@pytest.mark.parametrize("given", [WORDS, WORDS[:3]], ids=["batch", "no batch"])
def test_a_run_that_resumes_keeps_its_layout(tmp_path, place, given):
    recorded = record(tmp_path, "training.remat=dots")
    resume = f"training.resume={tmp_path / place}"
    words, notes = with_layout([*given, TARGET, resume])
    found = settings([word for word in words if word != resume])
    assert found.model.mesh_shape == recorded.model.mesh_shape
    assert found.training == recorded.training
    assert notes == [f"the layout is that of the run in {tmp_path}"]


def test_a_run_that_resumes_takes_what_is_written(tmp_path):
    record(tmp_path, "training.remat=dots")
    resume = f"training.resume={tmp_path}"
    words, _ = with_layout([*WORDS, TARGET, resume, "training.remat=full"])
    found = settings([word for word in words if word != resume])
    assert found.training.remat == "full"


@pytest.mark.full
@pytest.mark.usefixtures("traced_before")
def test_on_other_devices_a_run_resumes_with_another_layout(tmp_path):
    recorded = record(tmp_path)
    resume = f"training.resume={tmp_path}"
    words, notes = with_layout([*WORDS[:3], "runtime.target=cpu:4", resume])
    found = settings([word for word in words if word != resume])
    assert math.prod(found.model.mesh_shape[0]) == 4
    total = recorded.training.global_batch_size
    assert found.training.global_batch_size == total == 8
    assert notes[0].startswith("model.mesh_shape=auto chose ")


def test_the_batch_of_a_run_without_a_global_one_is_that_of_its_groups(tmp_path):
    batch = ["training.global_batch_size=null", "training.micro_batch_size=3"]
    mesh = "model.mesh_shape=[[2,2],[fsdp,tp]]"
    record(tmp_path, *batch, mesh, "training.gradient_accumulation_steps=2")
    run = auto_layout._RecordedRun.find([f"training.resume={tmp_path}"])
    assert run.global_batch_size == 12


@pytest.mark.parametrize("text", ["", "[1, 2]", "model: 3", "a: b: c", "model: {}"])
def test_a_file_that_is_no_record_of_a_run_is_left_to_the_trainer(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    assert auto_layout._RecordedRun.find([f"training.resume={tmp_path}"]) is None


def test_resuming_from_the_own_folder_reads_no_other(tmp_path, monkeypatch):
    """A file ``config.yaml`` of something else, in the working folder and above."""
    monkeypatch.chdir(tmp_path)
    record(tmp_path)
    for own in ([], [f"hydra.run.dir={tmp_path / 'new'}"]):
        assert auto_layout._RecordedRun.find(["training.resume=auto", *own]) is None


@pytest.mark.full
@pytest.mark.usefixtures("traced_before")
def test_where_no_layout_is_safe_the_smallest_is_taken(monkeypatch):
    monkeypatch.setitem(MARGIN, "cpu", 1e9)
    words, notes = with_layout([*WORDS, TARGET])
    answer = plan_run([*WORDS[1:], TARGET])
    smallest = min(answer.ranked, key=lambda each: each.prediction.memory_bytes)
    assert {*smallest.layout.overrides()} <= {*words}
    assert notes[0].endswith("the smallest, as none surely fits")


def shown(monkeypatch, found: str, **variables: str) -> str:
    """The target of a rank to which JAX shows some devices."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(auto_layout, "_PROBE", f"print({found!r})")
    return auto_layout._target(WORDS)


H100S = '["gpu", "NVIDIA H100 80GB HBM3", {}, [[]]]'
ON_TWO_MACHINES = {**TORCHRUN, "WORLD_SIZE": "4"}
THREE_ON_ONE_MACHINE = {**TORCHRUN, "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}


@pytest.mark.parametrize(
    ("variables", "found", "target"),
    [
        (TORCHRUN, H100S.format(8), "h100:1x8"),
        (ON_TWO_MACHINES, H100S.format(8), "h100:2x8"),
        # A scheduler shows each process its own device alone.
        (ON_TWO_MACHINES, H100S.format(1), "h100:2x2"),
        # Three processes on eight devices have two each.
        (
            {**TORCHRUN, "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"},
            H100S.format(8),
            "h100:1x6",
        ),
        (TORCHRUN, '["cpu", "cpu", 1, [[]]]', "cpu:2"),
        ({**TORCHRUN, "JAX_NUM_CPU_DEVICES": "4"}, '["cpu", "cpu", 4, [[]]]', "cpu:8"),
    ],
)
def test_the_machines_of_a_run_are_like_this_one(monkeypatch, variables, found, target):
    assert shown(monkeypatch, found, **variables) == target


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        (TORCHRUN, '["tpu", "TPU v5 lite", 1, [[0, 0, 0]]]'),
        # Two processes here and one elsewhere.
        ({**TORCHRUN, "WORLD_SIZE": "3"}, H100S.format(8)),
    ],
)
def test_devices_that_cannot_be_told_are_to_be_named(monkeypatch, variables, found):
    with pytest.raises(TargetError) as caught:
        shown(monkeypatch, found, **variables)
    assert "without runtime.target" in caught.value.got
    assert "runtime.target=h100:2x8" in caught.value.fix


def test_devices_without_a_file_are_refused(monkeypatch):
    probe = 'print(\'["gpu", "Abacus 9", 1, [[]]]\')'
    monkeypatch.setattr(auto_layout, "_PROBE", probe)
    with pytest.raises(TargetError) as caught:
        with_layout(WORDS)
    assert "no target has devices of the kind 'Abacus 9'" in str(caught.value)
    assert "runtime.target=./cluster.toml:2x8" in caught.value.fix


def test_devices_become_a_target(monkeypatch):
    for found, target in {
        '["gpu", "NVIDIA H100 80GB HBM3", 8, [[]]]': "h100:1x8",
        '["tpu", "TPU v5 lite", 4, [[0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 1, 0]]]': (
            "v5e:2x2"
        ),
    }.items():
        assert shown(monkeypatch, found) == target


@pytest.mark.full
@pytest.mark.usefixtures("traced_before")
def test_an_error_is_that_of_the_planner(monkeypatch, capsys):
    words = [*WORDS[:3], "training.global_batch_size=5", "runtime.target=cpu:7"]
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(words)))
    assert auto_layout.main() == PlanError("").exit_code
    assert "[T714] no layout on cpu:7 is legal" in capsys.readouterr().err


def test_the_planner_imports_the_modules_of_the_run(monkeypatch, capsys):
    words = ["--module", "no_such_module", AUTO]
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(words)))
    assert auto_layout.main() == 2
    error = capsys.readouterr().err
    assert "[T403] the module 'no_such_module' of a model cannot be imported" in error


@pytest.mark.full
def test_a_run_chooses_its_mesh(tmp_path):
    """The whole way: two steps on four simulated devices, and one more."""
    common = [
        "training.steps=2",
        "training.sample_length=0",
        "training.report=false",
        f"hydra.run.dir={tmp_path}",
    ]
    line = [sys.executable, ROOT / "run_training.py", *WORDS, *common]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}

    def run(*more):
        done = subprocess.run(
            [*line, *more],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr

    run()
    log = (tmp_path / "train.log").read_text()
    assert "model.mesh_shape=auto chose " in log
    first = yaml.safe_load((tmp_path / "config.yaml").read_text())
    sizes, _ = first["model"]["mesh_shape"]
    assert math.prod(sizes) == 4
    run("training.steps=3", "training.resume=auto")
    second = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert second["model"] == first["model"]
    assert "the layout is that of the run in" in (tmp_path / "train.log").read_text()
    assert "resuming from" in (tmp_path / "train.log").read_text()
