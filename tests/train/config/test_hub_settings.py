# SPDX-License-Identifier: Apache-2.0
"""Names of the Hub on a command line: the configuration has their commits."""

import pytest

from tessera.errors import (
    HubError,
    SettingConflictError,
    SettingValueError,
    UnknownModelError,
)
from tessera.train.checkpoints.metadata import write_metadata
from tessera.train.config.command_line import compose
from tessera.train.config.config_schema import settings_of_text
from tessera.train.config.named_model import own_data
from tessera.train.loop.main import configs_dir
from tests.train.checkpoints.test_metadata import METADATA
from tests.train.files import hub_server
from tests.train.files.hub_server import Repo
from tests.train.models.published_folders import GEMMA3, gemma3_tensors, write_folder

SYNTHETIC = "data=synthetic"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with hub_server.serve(monkeypatch, tmp_path / "cache") as hub:
        yield hub


@pytest.fixture
def commit(hub, tmp_path):
    """The commit of a model of the Hub."""
    folder = write_folder(tmp_path / "written", gemma3_tensors(GEMMA3), GEMMA3)
    return hub.push_folder("models/org/gemma", folder, **{"tokenizer.json": b"{}"})


def composed(*overrides):
    both = compose(overrides, configs_dir())
    # A checkpoint keeps what was chosen.
    assert settings_of_text(both.text) == both.config
    return both


def checkpoint_of(both, folder):
    """A checkpoint as far as its configuration goes."""
    values = {**vars(METADATA), "config": both.text}
    path = folder / "checkpoints" / "4"
    path.mkdir(parents=True)
    write_metadata(path / "metadata.json", type(METADATA)(**values))
    (path / "manifest.sha256").touch()


def test_a_model_of_the_hub_has_a_commit_and_its_tokenizer(hub, commit):
    both = composed("model=org/gemma", "data=text", "data.path=books.txt")
    name = f"hf://org/gemma@{commit}"
    assert both.config.training.init_from == name
    assert both.config.data.tokenizer == name
    assert both.config.model.name == "gemma"
    assert both.notes[0] == f"model=org/gemma is {name}"
    assert set(both.published) == {"config.json"}
    # The weights are downloaded once nothing is wrong with the settings.
    assert "model.safetensors" not in hub.downloads


def test_a_folder_of_that_name_is_used_and_the_log_says_so(hub, commit, tmp_path):
    write_folder(tmp_path / "org" / "gemma", gemma3_tensors(GEMMA3), GEMMA3)
    both = composed("model=org/gemma", SYNTHETIC)
    assert both.config.training.init_from == "org/gemma"
    assert both.notes[0] == "model=org/gemma is the folder here, not a model of the Hub"
    assert hub.requests == []
    both = composed("model=hf://org/gemma", SYNTHETIC)
    assert both.config.training.init_from == f"hf://org/gemma@{commit}"


def test_a_name_beside_a_folder_says_how_to_write_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen").mkdir()
    with pytest.raises(UnknownModelError, match=r"write model=\./qwen for"):
        composed("model=qwen")
    (tmp_path / "books").mkdir()
    with pytest.raises(SettingValueError, match=r"write data=\./books for"):
        composed("data=books")


@pytest.mark.slow(reason="it composes six configurations")
def test_a_resumed_run_keeps_its_commit_when_main_moves(hub, commit, tmp_path):
    run = tmp_path / "run"
    words = ("model=org/gemma", f"hydra.run.dir={run}", "data=text", "data.path=x.txt")
    checkpoint_of(composed(*words), run)
    files = hub.repos["models/org/gemma"].files_of()
    moved = hub.repos["models/org/gemma"].push({**files, "tokenizer.json": b"[]"})
    hub.requests.clear()

    def tokenizer(*overrides):
        return composed(*overrides).config.data.tokenizer

    old, new = f"hf://org/gemma@{commit}", f"hf://org/gemma@{moved}"
    assert tokenizer(*words, "training.resume=auto") == old
    assert tokenizer(*words[::2], "data.path=x.txt", f"training.resume={run}") == old
    assert hub.requests == []  # neither asks what main is
    assert tokenizer(*words) == new  # a new run
    assert tokenizer(*words, f"training.resume={tmp_path / 'none'}") == new
    named = f"model=org/gemma@{commit}"
    assert tokenizer(named, *words[1:], "training.resume=auto") == old
    with pytest.raises(HubError, match="used another commit of org/gemma") as caught:
        tokenizer("model=org/gemma@main", *words[1:], "training.resume=auto")
    assert commit in caught.value.got
    assert moved in caught.value.got


@pytest.mark.parametrize("given", [True, False])
def test_an_attempt_of_the_launcher_keeps_the_commit_of_the_first(
    hub, commit, tmp_path, monkeypatch, given
):
    run = tmp_path / "run"
    words = ("model=org/gemma", SYNTHETIC, *[f"hydra.run.dir={run}"] * given)
    checkpoint_of(composed(*words), run)
    moved = hub.repos["models/org/gemma"].push(
        {**hub.repos["models/org/gemma"].files_of(), "README.md": b"new"}
    )
    variables = {"FOLDER": tmp_path, "LAUNCHER": 1, "STATUS": 1, "ATTEMPT": 0}
    for name, value in variables.items():
        monkeypatch.setenv(f"TESSERA_{name}", str(value))
    name = composed(*words).config.training.init_from
    assert name == f"hf://org/gemma@{moved}"
    if not given:
        (tmp_path / "shared").write_text(str(run))  # as rank 0 did
    monkeypatch.setenv("TESSERA_ATTEMPT", "1")
    name = composed(*words).config.training.init_from
    assert name == f"hf://org/gemma@{commit}"


def test_weights_and_tokenizers_may_be_of_the_hub_alone(hub, commit):
    name = f"hf://org/gemma@{commit}"
    training = composed("training.init_from=org/gemma", SYNTHETIC).config.training
    assert training.init_from == name
    data = composed("data.tokenizer=org/gemma@main").config.data
    assert data.tokenizer == name
    with pytest.raises(SettingValueError, match="model names a data set"):
        composed("model=hf://datasets/org/gemma")
    # No path of anything: it stays as it is.
    prompt = "training.sample_prompt='hf://org/gemma'"
    assert composed(prompt).config.training.sample_prompt == "hf://org/gemma"


def test_a_reward_model_of_the_hub_has_a_commit_and_keeps_it(hub, commit, tmp_path):
    run, name = tmp_path / "run", f"hf://org/gemma@{commit}"
    (tmp_path / "org" / "here").mkdir(parents=True)
    rewards = "rewards=[exact,org/gemma,my:f,org/here,./there/]"
    words = ("recipe=grpo", "data=prompts", "data.path=x.jsonl", rewards)
    words = (*words, f"hydra.run.dir={run}")
    both = composed(*words)
    found = ["exact", name, "my:f", "org/here", "./there/"]
    assert both.config.rewards == found
    checkpoint_of(both, run)
    hub.repos["models/org/gemma"].push({"README.md": b"new"})
    assert composed(*words, "training.resume=auto").config.rewards == found
    assert composed(*words).config.rewards != found
    with pytest.raises(SettingValueError, match="names a data set"):
        composed(*words[:3], "rewards=[hf://datasets/org/gemma]")


def test_a_data_set_of_the_hub_has_a_commit(hub, tmp_path):
    hub.repos["datasets/org/chats"] = Repo()
    commit = hub.repos["datasets/org/chats"].push({"README.md": b""})
    name = f"hf://datasets/org/chats@{commit}"
    data = composed("data=org/chats", "data.split=test").config.data
    assert (data.name, data.path, data.split) == ("text", name, "test")
    files = "data.path=hf://datasets/org/chats/data/*.parquet"
    assert composed("data=text", files).config.data.path == f"{name}/data/*.parquet"
    source = "data.sources={a: {path: hf://datasets/org/chats, split: test}}"
    assert composed("data=mixture", source).config.data.sources["a"].path == name
    assert composed("data=./books").config.data.path == "./books"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data=org/chats", "data.path=x"], "data= and data.path both name the data"),
        (["data=./chats", "data.split=test"], "data.split is of a whole data set"),
        (
            ["data=text", "data.path=hf://datasets/a/b/x.jsonl", "data.subset=c"],
            "data.subset is of a whole data set",
        ),
    ],
)
def test_settings_that_a_path_does_not_use_are_refused(hub, words, message):
    hub.repos["datasets/a/b"] = Repo()
    hub.repos["datasets/a/b"].push({})
    with pytest.raises(SettingConflictError, match=message):
        composed(*words)


@pytest.mark.parametrize(
    ("recipe", "kind"),
    [("preference", "preferences"), ("grpo", "prompts"), ("lora", "text")],
)
def test_a_path_is_of_the_data_that_the_recipe_reads(recipe, kind):
    choices = {"data": "./pairs", "recipe": recipe}
    assert own_data(choices, []) == "./pairs"
    assert choices["data"] == kind


def test_a_path_of_data_is_of_no_model(hub):
    with pytest.raises(SettingValueError, match=r"data\.path names a model") as caught:
        composed("data=text", "data.path=hf://org/chats")
    assert "hf://datasets/org/chats" in caught.value.fix
    assert hub.requests == []
