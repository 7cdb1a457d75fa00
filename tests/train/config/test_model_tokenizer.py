# SPDX-License-Identifier: Apache-2.0
"""A folder of weights brings its tokenizer; another one has to be named."""

import shutil

import pytest

from tessera.errors import TokenizerError
from tessera.train.config.command_line import compose
from tessera.train.config.config_schema import settings_of_text
from tessera.train.data.tokenization import load_tokenizer
from tessera.train.loop.main import configs_dir
from tests.train.models.published_folders import GEMMA3, gemma3_tensors, write_folder

TEXT = ("data=text", "data.path=books.txt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "gemma"
    write_folder(path, gemma3_tensors(GEMMA3), GEMMA3)
    (path / "tokenizer.json").write_text("{}")
    return path


def composed(*overrides):
    return compose(overrides, configs_dir())


def tokenizer(*overrides):
    both = composed(*overrides)
    # A checkpoint keeps what was chosen.
    assert settings_of_text(both.text) == both.config
    return both.config.data.tokenizer


def test_the_tokenizer_is_that_of_the_weights(folder, monkeypatch):
    assert tokenizer(f"model={folder}", *TEXT) == str(folder)
    assert tokenizer(f"model={folder}") == str(folder)
    weights = folder / "model.safetensors"
    assert tokenizer(f"training.init_from={weights}", *TEXT) == str(folder)
    monkeypatch.chdir(folder)
    assert tokenizer("training.init_from=model.safetensors", *TEXT) == "."
    # Where a run goes on, its checkpoint has the weights.
    resumes = "training.resume=outputs/mine"
    assert tokenizer(f"model={folder}", resumes, *TEXT) == str(folder)


def test_a_model_names_its_weights_and_tokenizer_and_nobody_changed_them(folder):
    model = f"model={folder}"
    assert composed(model).changed == (model,)
    resumes = "training.resume=outputs/mine"
    assert composed(model, resumes).changed == (
        *(model, "training.resume='outputs/mine'"),
    )
    from_nothing = "training.init_from=null"
    assert composed(model, from_nothing, *TEXT).changed == (
        *(model, "data=text", from_nothing, "data.path=books.txt"),
    )


def test_a_model_without_a_folder_reads_bytes(tmp_path):
    assert tokenizer() == "bytes"
    assert tokenizer(*TEXT) == "bytes"
    alone = f"training.init_from={tmp_path}/model.safetensors"
    assert tokenizer(alone, *TEXT) == "bytes"


def test_synthetic_tokens_have_none(folder):
    assert tokenizer(f"model={folder}", "data=synthetic") is None


def test_another_tokenizer_is_used_and_noted(folder, tmp_path):
    def notes(name):
        both = composed(f"model={folder}", *TEXT, f"data.tokenizer={name}")
        assert both.config.data.tokenizer == str(name)
        return [note for note in both.notes if "tokenizer of their own" in note]

    assert notes(folder) == []
    assert notes(shutil.copytree(folder, tmp_path / "copy")) == []
    (tmp_path / "other.json").write_text("[]")
    assert notes(tmp_path / "other.json")[0].endswith("tokens other meanings")
    assert len(notes("bytes")) == 1


def test_a_folder_without_a_tokenizer_is_no_reason_for_bytes(folder, tmp_path):
    path = shutil.copytree(folder, tmp_path / "gemma")
    (path / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match="has no tokenizer"):
        load_tokenizer(tokenizer(f"model={path}", *TEXT))
