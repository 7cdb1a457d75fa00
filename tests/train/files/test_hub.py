# SPDX-License-Identifier: Apache-2.0
"""Names of the Hub, and what is downloaded for them."""

import builtins

import pytest

from tessera.errors import HubError, MissingLibraryError, SettingValueError
from tessera.train.files.hub import WEIGHT_FILES, HubName, local_path
from tests.train.files import hub_server
from tests.train.files.hub_server import Repo

COMMIT = "0123456789" * 4
FILES = {"config.json": b"{}", "model.safetensors": b"weights"}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with hub_server.serve(monkeypatch, tmp_path / "cache") as hub:
        hub.repos["models/org/model"] = Repo()
        hub.repos["models/org/model"].push(FILES)
        yield hub


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("hf://org/model", HubName("org/model")),
        ("hf://org/model@v1", HubName("org/model", "v1")),
        ("hf://org/model@refs/pr/3", HubName("org/model", "refs/pr/3")),
        ("hf://datasets/org/set", HubName("org/set", None, True)),
        (f"hf://datasets/org/set@{COMMIT}", HubName("org/set", COMMIT, True)),
        (
            "hf://datasets/org/set@v1/data/*.parquet",
            HubName("org/set", "v1", True, "data/*.parquet"),
        ),
        (
            "hf://datasets/org/set@refs/convert/parquet/default/train",
            HubName("org/set", "refs/convert/parquet", True, "default/train"),
        ),
    ],
)
def test_a_configuration_says_repository_revision_and_files(text, name):
    assert HubName.parse(text) == name
    assert str(name) == text


@pytest.mark.parametrize("text", ["hf://", "hf://model", "hf://../x", "hf://a/b@"])
def test_a_malformed_name_is_refused(text):
    with pytest.raises(SettingValueError, match="names no repository"):
        HubName.parse(text)


def test_a_slash_makes_a_name_one_of_the_hub_unless_there_is_such_a_path(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert HubName.find("org/model@v1") == HubName("org/model", "v1")
    assert HubName.find("org/set", is_dataset=True) == HubName("org/set", None, True)
    for path in ("./org/model", "../org", "/org/model", "~/model", "a/b/c", "model"):
        assert HubName.find(path) is None
    for file in ("org/model.safetensors", "org/tokenizer.json", "org/chats.jsonl"):
        assert HubName.find(file) is None
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert HubName.find("org/model") is None
    assert HubName.find("hf://org/model") == HubName("org/model")


def test_only_what_is_needed_is_downloaded_and_never_pickles(hub):
    tokenizer = {"tokenizer.json": b"[]", "chat_template.jinja": b"{{ x }}"}
    others = dict.fromkeys(
        (
            *("pytorch_model.bin", "model.pkl", "consolidated.safetensors"),
            *("original/model.safetensors", "onnx/config.json", "code.py"),
        ),
        b"x",
    )
    commit = hub.repos["models/org/model"].push({**FILES, **tokenizer, **others})
    name = HubName("org/model").pin()
    assert name == HubName("org/model", commit)
    assert sorted(hub.downloads) == sorted({"config.json", *tokenizer})
    folder = name.download(WEIGHT_FILES)
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert {file.name for file in folder.iterdir()} == {*FILES, *tokenizer}


def test_a_commit_is_the_same_files_whatever_is_pushed(hub):
    name = HubName("org/model").pin()
    new = hub.repos["models/org/model"].push({"config.json": b"{'other': 1}"})
    assert HubName("org/model").pin().revision == new != name.revision
    config = name.download(WEIGHT_FILES) / "config.json"
    assert config.read_bytes() == b"{}"
    hub.requests.clear()
    assert local_path(str(name)) == config.parent
    assert hub.requests == []  # all are in the cache


def test_without_a_network_the_cache_is_used(hub, monkeypatch):
    name = HubName("org/model").pin()
    name.download(WEIGHT_FILES)
    hub_server.offline(monkeypatch)
    assert HubName("org/model").pin() == name
    assert name.download(WEIGHT_FILES).is_dir()


def test_without_a_network_and_a_whole_cache_the_error_says_what_to_type(
    hub, monkeypatch, tmp_path
):
    cached = HubName("org/model").pin()  # its weights are not in the cache
    hub_server.offline(monkeypatch)
    with pytest.raises(HubError) as caught:
        HubName("org/other", "v1").pin()
    assert str(caught.value) == (
        "[T719] org/other cannot be downloaded, and is not whole in the cache\n"
        "  got: HF_HUB_OFFLINE is set\n"
        "  got: there is no folder 'org/other' here, either\n"
        "  fix: where there is a network, run: hf download org/other --revision v1 "
        "--local-dir other\n"
        "  fix: bring the folder here, and write model=./other\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T719.html"
    )
    with pytest.raises(HubError, match="is not whole in the cache"):
        cached.download(WEIGHT_FILES)
    hub_server.use("http://127.0.0.1:1", monkeypatch, tmp_path / "empty")
    with pytest.raises(HubError, match="Connection refused") as caught:
        HubName("org/set", None, True).pin()
    assert "hf download org/set --repo-type dataset\n" in caught.value.fix
    assert "HF_HOME" in caught.value.fix


def test_what_the_hub_does_not_have_or_give(hub, monkeypatch):
    with pytest.raises(HubError, match="has no model 'org/none', or it is private"):
        HubName("org/none").pin()
    with pytest.raises(HubError, match="org/model has no revision 'v9'"):
        HubName("org/model", "v9").pin()
    hub.repos["models/org/model"].is_gated = True
    with pytest.raises(HubError, match="gated") as caught:
        HubName("org/model").pin()
    assert f"accept its terms on {hub.url}/org/model" in caught.value.fix
    assert "hf auth login" in caught.value.fix
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert HubName("org/model").pin().is_pinned


def test_a_missing_library_names_its_extra(monkeypatch):
    def fails(name, *args):
        if name.startswith("huggingface_hub"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return imported(name, *args)

    imported = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", fails)
    with pytest.raises(MissingLibraryError) as caught:
        HubName("org/model").pin()
    assert "pip install 'tessera-spmd[hub]'" in caught.value.fix
