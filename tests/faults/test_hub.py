# SPDX-License-Identifier: Apache-2.0
"""Processes that look up one name of the Hub: one commit, or an error."""

import json
import subprocess
import sys

import pytest

from tests.faults.trainer import PROGRAM, environ
from tests.train.files import hub_server
from tests.train.models.published_folders import GEMMA3, gemma3_tensors, write_folder

TRAIN = (
    *("model=org/gemma", "model.mesh_shape=[[2],[fsdp]]", "training.steps=1"),
    *("data=synthetic", "data.synthetic.tokens=4000", "training.sequence_length=16"),
    *("training.micro_batch_size=2", "training.sample_length=0"),
    *("training.report=false", "hydra.run.dir=run"),
)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with hub_server.serve(monkeypatch, tmp_path / "unused") as hub:
        folder = write_folder(tmp_path / "written", gemma3_tensors(GEMMA3), GEMMA3)
        hub.push_folder("models/org/gemma", folder)
        yield hub


@pytest.fixture
def launch(hub, tmp_path):
    """Trains in two processes, which find the Hub by its environment variables."""

    def run(*words, **changed):
        variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}
        launcher = ("-m", "tessera.train.commands.launch", "--nprocs=2")
        return subprocess.run(
            [sys.executable, *launcher, PROGRAM, *TRAIN, *words],
            cwd=tmp_path,
            env={**environ(), **variables, "HF_HUB_OFFLINE": "0", **changed},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run


@pytest.mark.full
def test_processes_share_a_download(hub, launch, tmp_path):
    done = launch()
    assert done.returncode == 0, done.stderr
    weights = [name for name in hub.downloads if name == "model.safetensors"]
    assert len(weights) == 1
    (tmp_path / "run").rename(tmp_path / "first")
    hub.requests.clear()
    assert launch(HF_HUB_OFFLINE="1").returncode == 0
    assert hub.requests == []


@pytest.mark.full
def test_a_push_between_two_processes_is_an_error_in_both(hub, launch):
    repo = hub.repos["models/org/gemma"]
    first = repo.branches["main"]
    readme = {**repo.files_of(), "generation_config.json": json.dumps({}).encode()}
    hub.pushes.append(lambda: repo.push(readme))
    done = launch()
    assert done.returncode != 0
    assert "[T707] the ranks have different configurations" in done.stderr
    assert f"hf://org/gemma@{first}" in done.stderr
    assert f"hf://org/gemma@{repo.branches['main']}" in done.stderr
    assert "write the commit" in done.stderr
