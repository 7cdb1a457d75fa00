# SPDX-License-Identifier: Apache-2.0
"""A run that begins with a model of the Hub: trained, resumed and exported."""

import json

import pytest

from tessera.train.commands.export import main as export
from tessera.train.config.command_line import compose
from tessera.train.config.mesh_shape import mesh_of_shape
from tessera.train.loop.build_run import Run
from tessera.train.loop.main import configs_dir, main
from tessera.train.models import from_pretrained
from tests.train.files import hub_server
from tests.train.models.published_folders import GEMMA3, gemma3_tensors, write_folder

SMALL = (
    *("data=synthetic", "data.synthetic.tokens=4000", "training.report=false"),
    *("training.sequence_length=16", "training.micro_batch_size=4"),
    *("training.sample_length=0", "optimizer.learning_rate=1e-12"),
)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with hub_server.serve(monkeypatch, tmp_path / "cache") as hub:
        folder = write_folder(tmp_path / "written", gemma3_tensors(GEMMA3), GEMMA3)
        (folder / "generation_config.json").write_text('{"temperature": 0.5}')
        hub.push_folder("models/org/gemma", folder)
        yield hub


def move_main(hub):
    """A model of other sizes and generation settings becomes that of ``main``."""
    files = hub.repos["models/org/gemma"].files_of()
    config = json.dumps({**GEMMA3, "sliding_window": 4}).encode()
    other = {"config.json": config, "generation_config.json": b'{"temperature": 2}'}
    return hub.repos["models/org/gemma"].push({**files, **other})


def test_a_dry_run_downloads_no_weights_and_a_run_does(hub):
    def run(*words):
        composed = compose(["model=org/gemma", *SMALL, *words], configs_dir())
        config = composed.config
        return Run(config, mesh_of_shape(config.model.mesh_shape))

    run("training.dry_run=true").check()
    assert "model.safetensors" not in hub.downloads
    run().check()
    assert "model.safetensors" in hub.downloads


def test_a_model_of_the_hub_is_read_in_python_too(hub):
    model, params = from_pretrained("org/gemma@main")
    assert model.config.window == GEMMA3["sliding_window"]
    assert params["embedding"].shape == (48, 16)


@pytest.mark.full
def test_a_moved_main_changes_neither_a_resumed_run_nor_its_export(
    hub, tmp_path, monkeypatch
):
    commit = hub.repos["models/org/gemma"].branches["main"]
    words = ["model=org/gemma", *SMALL, f"hydra.run.dir={tmp_path / 'run'}"]
    assert main([*words, "training.steps=1"]) == 0
    move_main(hub)
    assert main([*words, "training.steps=2", "training.resume=auto"]) == 0
    log = (tmp_path / "run" / "train.log").read_text()
    assert "resuming from" in log
    assert f"model=org/gemma is hf://org/gemma@{commit}" in log
    assert "training.init_from:" not in log  # among the changed settings
    hub_server.offline(monkeypatch)
    assert export([str(tmp_path / "run"), str(tmp_path / "out"), "--format=hf"]) == 0
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert values["sliding_window"] == GEMMA3["sliding_window"]
    values = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert values["temperature"] == 0.5


@pytest.mark.full
def test_adapters_name_the_repository_and_the_commit(hub, tmp_path):
    commit = hub.repos["models/org/gemma"].branches["main"]
    words = ["model=org/gemma", *SMALL, f"hydra.run.dir={tmp_path / 'run'}"]
    assert main([*words, "training.steps=1", "model.lora.rank=2"]) == 0
    assert export([str(tmp_path / "run"), str(tmp_path / "out"), "--format=peft"]) == 0
    values = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert values["base_model_name_or_path"] == "org/gemma"
    assert values["revision"] == commit
