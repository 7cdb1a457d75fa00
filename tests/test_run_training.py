# SPDX-License-Identifier: Apache-2.0
"""``run_training.py`` as a person starts it: what it shows, writes and refuses."""

import gzip
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import pytest
import yaml

from tessera.train.loop import train
from tests.train.config.command_lines import run_from_command_line

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "run_training.py"

# A run of seconds: the default model and data, and little of both.
SHORT = (
    "training.steps=4",
    "training.sequence_length=32",
    "training.micro_batch_size=2",
    "training.log_every=2",
    "training.validation_sequences=4",
    "training.sample_length=5",
    "training.report=false",
)

SMALL = (
    *("model.d_model=32", "model.num_layers=1", "model.num_heads=2"),
    *("model.num_kv_heads=2", "model.head_dim=16", "model.mlp_dim=64"),
)

# Runs a command for at most two minutes and prints the most memory that it held. Linux
# counts a process's peak from its parent's, so the parent has to be a small one.
MEASURED = """
import resource, subprocess, sys
status = subprocess.run(sys.argv[1:], timeout=120).returncode
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(status)
"""


def start(
    folder: Path, *arguments: str, through: Sequence[str] = (), **environment: str
) -> "subprocess.Popen[str]":
    """A process of its own, in a folder of its own."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PJRT_NPROC", "JAX_NUM_CPU_DEVICES")
    }
    return subprocess.Popen(
        [*through, sys.executable, str(SCRIPT), *arguments],
        cwd=folder,
        env={**kept, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(folder: Path, *arguments: str, **environment: str) -> str:
    """What a run that succeeds shows."""
    process = start(folder, *arguments, **environment)
    try:
        seen, errors = process.communicate(timeout=480)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    assert not re.search("Traceback|Warning", errors)
    return seen


def metrics(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


# --- a run


@pytest.mark.full
def test_a_run_shows_and_keeps_everything(tmp_path):
    folder = tmp_path / "run"
    seen = run(tmp_path, *SHORT, f"hydra.run.dir={folder}")

    # Not a terminal: plain lines, each with the time, and no color.
    assert "\x1b" not in seen
    assert "weight_decay" not in seen  # what nobody set
    for said in (
        "  model      tiny: 1,511,936 parameters\n",
        "  weights    random, by training.seed=0\n",
        "  data       standard library of Python",
        "  devices    one CPU device\n",
        "  mesh       fsdp × tp mesh, 1 × 1\n",
        "  precision  float32\n",
        "  batch      2 sequences of 32 tokens a step; 4 steps are ",
        "  settings   training.steps=4 ",
        "compiling the step",
        "compiled in ",
        "  memory per device  ",
        "step 1/4  loss ",
        "step 2/4  loss ",
        "step 4/4  loss ",
        "validation after step 4: loss ",
        "sample\n  def ",
        f"the run is in {folder}",
    ):
        assert said in seen, said
    assert re.search(r"^\d\d:\d\d:\d\d step 1/4  loss \d\.\d{4}  ", seen, re.M)

    assert {path.name for path in folder.iterdir()} == {
        "train.log",
        "metrics.jsonl",
        "events.jsonl",
        "tensorboard",
        "config.yaml",
        "checkpoints",
    }
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    shown = [line for line in seen.splitlines() if re.match(r"\d\d:\d\d:\d\d ", line)]
    logged = (folder / "train.log").read_text()
    assert all(line[9:] in logged for line in shown)
    assert "\n  weight_decay: 0.1\n" in logged
    assert "\nparameters         1,511,936\n" in logged

    *steps, validation = metrics(folder)
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    for line in steps:
        names = {
            name for name in line if "goodput" not in name and "badput" not in name
        }
        assert ("goodput" in line) == (line["step"] != 3), "the log shows the others"
        assert names == {
            "step",
            "loss",
            "grad_norm",
            "learning_rate",
            "tokens_per_second",
            "step_seconds",
            "data_wait_fraction",
            "skipped",
            "skipped_in_a_row",
        }
    # A model that has learnt nothing: ln(264) + 1/2, or so.
    assert abs(steps[0]["loss"] - math.log(264)) < 1
    assert validation.keys() == {"step", "val_loss"}
    assert validation["step"] == 4
    assert f"validation after step 4: loss {validation['val_loss']:.4f}" in seen

    (events,) = (folder / "tensorboard").iterdir()
    assert "tfevents" in events.name
    assert b"grad_norm" in events.read_bytes()
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["training"]["steps"] == 4
    assert config["model"]["mesh_shape"] == [[1, 1], ["fsdp", "tp"]]


@pytest.mark.full
def test_a_mesh_on_cpu_is_simulated_and_its_communication_profiled(tmp_path):
    folder = tmp_path / "run"
    seen = run(
        tmp_path,
        *(*SHORT, *SMALL, "data=synthetic", "training.sample_length=0"),
        "training.profile_communication=true",
        'model.mesh_shape=[[2,2],["fsdp","tp"]]',
        f"hydra.run.dir={folder}",
    )
    simulated = "simulating 4 CPU devices: what they compute is right, how fast is not"
    assert simulated in " ".join(seen.split())
    assert "  mesh       fsdp × tp mesh, 2 × 2\n" in seen
    *_, validation, profiled = metrics(folder)
    assert len(metrics(folder)) == 6
    assert "val_loss" in validation
    assert profiled.keys() == {
        *("step", "communication_seconds/fsdp", "communication_seconds/tp"),
    }

    profile = folder / "profile"
    text = (profile / "communication.txt").read_text()
    assert "all-reduce" in text
    assert text.splitlines()[0] in seen
    assert {"communication over fsdp", "communication over tp"} <= {
        line[:23].rstrip() for line in text.splitlines()
    }
    assert "measured on cpu, per device and execution: mean of 2 executions" in seen
    (trace,) = profile.rglob("perfetto_trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))
    assert events["traceEvents"]


@pytest.mark.full
def test_axes_come_in_any_order_and_one_size_is_inferred(tmp_path, capsys):
    """In this process, which has eight devices."""
    folder = tmp_path / "run"
    given = (
        *(*SHORT, *SMALL, "data=synthetic", "training.sample_length=0"),
        *('model.mesh_shape=[[2,-1],["tp","fsdp"]]', f"hydra.run.dir={folder}"),
    )
    assert run_from_command_line(train.run, given) == 0
    seen = capsys.readouterr().out
    assert "simulating 8 CPU devices" in seen
    assert "  mesh       tp × fsdp mesh, 2 × 4\n" in seen
    assert "  batch      8 sequences of 32 tokens a step" in seen
    assert re.search(r"sent per step +(fsdp|tp): .*; (fsdp|tp): ", seen)
    assert len(metrics(folder)) == 5
    assert "val_loss" in metrics(folder)[-1]


# --- a dry run


@pytest.mark.full
def test_a_billion_parameters_on_a_cluster_are_planned_on_a_laptop(tmp_path):
    process = start(
        tmp_path,
        "model=gemma3_1b",
        "training.dry_run=true",
        'model.mesh_shape=[[8,2],["fsdp","tp"]]',
        through=(sys.executable, "-c", MEASURED),
    )
    seen, errors = process.communicate(timeout=150)
    assert process.returncode == 0, errors
    *_, peak = seen.split()

    assert "mesh               fsdp × tp mesh, 8 × 2, abstract\n" in seen
    assert "parameters         999,885,952\n" in seen
    assert "memory per device, compiled for cpu\n" in seen
    assert re.search(r"^  arguments +[\d.]+ [MG]iB$", seen, re.M)
    assert re.search(r"^all-reduce +tp +f32\[8,128,1152\] +26 +117 MiB ", seen, re.M)
    assert "step 1/" not in seen
    assert list(tmp_path.iterdir()) == []
    # The parameters alone are 4 GB; macOS counts in bytes and Linux in KiB.
    assert int(peak) * (1 if sys.platform == "darwin" else 1024) < 1.5e9


@pytest.mark.full
def test_a_sweep_runs_each_value_in_a_folder_of_its_own(tmp_path):
    given = ("optimizer.learning_rate=1e-3,1e-4", "hydra.sweep.dir=mine")
    given = (*SHORT, *SMALL, "data=synthetic", "training.sample_length=0", *given)
    seen = run(tmp_path, "--multirun", *given)
    assert "#1 : training.steps=4" in seen
    rates = []
    for number in range(2):
        folder = tmp_path / "mine" / str(number)
        config = yaml.safe_load((folder / "config.yaml").read_text())
        rates.append(config["optimizer"]["learning_rate"])
        assert len([line for line in metrics(folder) if "loss" in line]) == 4
    assert rates == [1e-3, 1e-4]


# --- mistakes


MISTAKES = {
    "unknown_axis": (
        ["model.mesh_shape=[[4,2],[fspd,tp]]"],
        "[T103] the model has no use for mesh axes 'fspd'\n"
        "  got: model.mesh_shape=[[4,2],[fspd,tp]]\n"
        "  fix: did you mean 'fsdp'? Known: 'dp', 'fsdp', 'ep_outer', 'ep', 'cp', "
        "'tp', 'pp'\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T103.html\n",
    ),
    "heads": (
        ["model.mesh_shape=[[1,3],[fsdp,tp]]"],
        "[T402] 4 attention heads cannot be divided over mesh axis 'tp'\n"
        "  got: num_heads = 4, num_kv_heads = 2, axis size 3, remainder 1\n"
        "  fix: use tp 2 or 4\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T402.html\n",
    ),
    "misspelt": (
        ["training.step=5"],
        "[T501] there is no setting 'training.step'\n"
        "  got: training.step=5\n"
        "  fix: did you mean 'training.steps'?\n",
    ),
    "missing_data": (
        ["data=text", "data.path=nowhere"],
        "[T601] there is no data at 'nowhere'\n",
    ),
    "vocabulary": (
        ["model.vocab_size=200"],
        "[T603] the tokenizer's vocabulary is larger than the model's\n"
        "  got: bytes tokenizer: 257 ids, model: 200, and id 256 precedes every "
        "document\n"
        "  fix: use a model.vocab_size of at least 257, or a tokenizer with "
        "fewer ids\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T603.html\n",
    ),
    "too_little_data": (
        ["data=synthetic", "data.synthetic.tokens=500"],
        "[T602] the training data is smaller than one batch\n",
    ),
    "parameters": (
        ["model.mesh_shape=[[1,4],[fsdp,tp]]", "model.mlp_dim=510"],
        "[T201] parameter 'decoder/mlp/down/kernel' cannot be split evenly over mesh "
        "axes ('tp',)\n",
    ),
}


@pytest.mark.slow(reason="it starts processes")
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_before_anything_is_compiled_or_written(
    name, tmp_path, monkeypatch, capsys
):
    arguments, message = MISTAKES[name]
    monkeypatch.chdir(tmp_path)
    compiled = []

    def listen(event: str, seconds: float, **kwargs: str) -> None:
        del seconds, kwargs
        compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        code = run_from_command_line(train.run, arguments)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    seen = capsys.readouterr()
    assert code == 2
    assert seen.err.startswith(message)
    assert "Traceback" not in seen.err
    assert seen.out == ""
    assert list(tmp_path.iterdir()) == []
    assert not [event for event in compiled if "backend_compile" in event]


def test_a_mistake_ends_the_process_with_code_two(tmp_path):
    process = start(tmp_path, "training.step=5")
    try:
        seen, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 2
    assert seen == ""
    assert errors.startswith(MISTAKES["misspelt"][1])
    assert errors.endswith(
        "\n  docs: https://tessera-spmd.github.io/tessera/errors/T501.html\n"
    )
    assert "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []


def test_a_platform_that_is_not_there_is_refused_even_for_a_dry_run(
    tmp_path, monkeypatch, capsys
):
    if jax.default_backend() != "cpu":
        pytest.skip("this machine has an accelerator")
    monkeypatch.chdir(tmp_path)
    arguments = ["training.dry_run=true", "runtime.platform=tpu"]
    assert run_from_command_line(train.run, arguments) == 2
    assert capsys.readouterr().err.startswith("[T702] there is no TPU that JAX can use")
