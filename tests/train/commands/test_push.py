# SPDX-License-Identifier: Apache-2.0
"""``tessera push``: what it checks, sends and leaves alone."""

import json

import numpy as np
import pytest
import safetensors.numpy

from tessera.train.commands.push import main
from tests.train.files import hub_server
from tests.train.files.hub_server import Repo
from tests.train.models.published_folders import GEMMA3, gemma3_tensors, write_folder


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with hub_server.serve(monkeypatch, tmp_path / "cache") as hub:
        monkeypatch.setenv("HF_TOKEN", hub.token)
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        yield hub


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "export", gemma3_tensors(GEMMA3), GEMMA3)


@pytest.fixture
def adapters(tmp_path):
    path = tmp_path / "adapters"
    path.mkdir()
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    tensors = {"a": np.zeros(2, np.float32)}
    safetensors.numpy.save_file(tensors, path / "adapter_model.safetensors")
    return path


@pytest.fixture
def push(capsys):
    def run(*words):
        code = main([str(word) for word in words])
        shown = capsys.readouterr()
        return code, shown.out + shown.err

    return run


def test_an_export_is_a_private_repository_with_its_address(hub, folder, push):
    (folder / "README.md").write_text("# A model")
    (folder / "optimizer.bin").write_bytes(b"state")
    code, shown = push(folder, "me/gemma")
    assert code == 0
    assert "not sent, no part of an export: optimizer.bin\n" in shown
    assert shown.endswith(f"{hub.url}/me/gemma (private)\n")
    repo = hub.repos["models/me/gemma"]
    assert repo.is_private
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    del files["optimizer.bin"]
    assert repo.files_of() == {".gitattributes": b"", **files}


def test_a_repository_is_public_if_asked_and_stays_as_it_is(hub, folder, push):
    assert push(folder, "me/gemma", "--public")[0] == 0
    assert not hub.repos["models/me/gemma"].is_private
    assert push(folder, "me/gemma")[1].endswith("me/gemma (public)\n")
    code, shown = push(folder, "me/gemma", "--private")
    assert code == 2
    assert "a push does not change who can see it" in shown


def test_what_an_earlier_push_left_of_a_model_is_replaced(hub, folder, push):
    """A template or shards of another model would be loaded with the new weights."""
    stale = ("chat_template.jinja", "model-00001-of-00002.safetensors")
    repo = hub.repos["models/me/gemma"] = Repo()
    repo.push({"notes.txt": b"", **dict.fromkeys(stale, b"old")})
    before = repo.branches["main"]
    assert push(folder, "me/gemma", "--revision=v2")[0] == 0
    assert repo.branches["main"] == before
    assert set(repo.files_of("v2")) == {
        *(".gitattributes", "notes.txt"),
        *(path.name for path in folder.iterdir()),
    }


def test_adapters_are_pushed_and_never_mixed_with_a_model(hub, folder, adapters, push):
    """Transformers would add them to weights that have them already."""
    assert push(adapters, "me/adapters")[0] == 0
    assert "adapter_model.safetensors" in hub.repos["models/me/adapters"].files_of()
    assert "a repository is for one of both" in push(folder, "me/adapters")[1]
    push(folder, "me/gemma")
    files = hub.repos["models/me/gemma"].files_of()
    assert "a repository is for one of both" in push(adapters, "me/gemma")[1]
    assert hub.repos["models/me/gemma"].files_of() == files


def test_nothing_is_sent_of_what_is_no_export(hub, folder, push, tmp_path):
    code, shown = push(tmp_path, "me/gemma")
    assert code == 2
    assert "[T806] the folder is no export, of a model or of adapters" in shown
    assert "fix: name what this writes: tessera export" in shown
    tensors = gemma3_tensors(GEMMA3)
    del tensors["model.norm.weight"]
    write_folder(folder, tensors, GEMMA3)
    assert "[T805]" in push(folder, "me/gemma")[1]
    assert "[T502] a repository has an owner" in push(folder, "gemma")[1]
    assert hub.requests == []


def test_a_push_without_permission_says_how_to_log_in(hub, folder, push, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    code, shown = push(folder, "me/gemma")
    assert code == 2
    assert shown.startswith("[T719] me/gemma was not pushed\n  got: ")
    assert "hf auth login (or set HF_TOKEN)" in shown
    assert hub.repos == {}
    hub_server.offline(monkeypatch)
    shown = push(folder, "me/gemma")[1]
    assert "[T719] me/gemma was not pushed" in shown
    assert "fix: push where the Hub is reached" in shown
