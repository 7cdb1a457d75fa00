# SPDX-License-Identifier: Apache-2.0
"""What a published folder says beside the model survives training and export."""

import json
from types import SimpleNamespace

import pytest

from tessera.errors import ModelFolderError
from tessera.train.checkpoints.saving import Checkpoints
from tessera.train.commands.export import main as export
from tessera.train.config.command_line import compose
from tessera.train.config.mesh_shape import mesh_of_shape
from tessera.train.data.cursor import Cursor
from tessera.train.loop.build_run import Run
from tessera.train.loop.main import configs_dir
from tessera.train.models.families.published_files import Published, published_texts
from tests.train.models.published_configs import CONFIGS

SMALL = (
    *("data=synthetic", "training.sequence_length=16"),
    *("training.micro_batch_size=2", "training.init_from=null"),
)
FAST = [*CONFIGS][:2]
# What differs: the weights are those of the text model alone.
OF_WEIGHTS = ("torch_dtype", "architectures", "model_type")
GENERATION = {
    "bos_token_id": 2,
    "do_sample": True,
    "eos_token_id": [1, 106],
    "temperature": 0.6,
    "transformers_version": "4.51.0",
}


def publish(folder, values, generation=None):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def exported(filled, folder, *overrides):
    """The JSON files of a folder whose model was trained and exported."""
    composed = compose([f"model={folder}", *SMALL, *overrides], configs_dir())
    run = Run(composed.config, mesh_of_shape(composed.config.model.mesh_shape))
    root = folder.parent / "checkpoints"
    with Checkpoints(
        run, root, composed.text, published=composed.published
    ) as checkpoints:
        checkpoints.save(4, filled(run), Cursor(16, {}))
    out = folder.parent / "out"
    assert export([str(root), str(out), "--format=hf"]) == 0
    return {path.name: json.loads(path.read_text()) for path in out.glob("*.json")}


@pytest.mark.slow(reason="it saves and exports a run of each family")
@pytest.mark.parametrize(
    "name",
    [n if n in FAST else pytest.param(n, marks=pytest.mark.full) for n in CONFIGS],
)
def test_every_key_of_a_published_folder_is_exported_again(filled, tmp_path, name):
    values = CONFIGS[name]
    files = exported(filled, publish(tmp_path / "model", values, GENERATION))
    text = values.get("text_config", values)
    again = files["config.json"]
    lost = {
        key: (value, again.get(key))
        for key, value in text.items()
        if key not in OF_WEIGHTS and again.get(key, ...) != value
    }
    assert lost == {}
    assert again["architectures"] == text["architectures"]
    assert again["model_type"] == text["model_type"]
    assert again["eos_token_id"] == values["eos_token_id"]
    of_folder = (text | values).get("torch_dtype", "float32")
    assert again["dtype"] == again["torch_dtype"] == of_folder
    assert files["generation_config.json"] == GENERATION


def test_a_folder_of_changed_sizes_keeps_what_is_not_about_the_computation(
    filled, tmp_path
):
    folder = publish(tmp_path / "model", CONFIGS["Gemma 3"])
    files = exported(
        filled, folder, "model.num_layers=3", "model.layer_types=[global,local,global]"
    )
    values = files["config.json"]
    assert values["max_position_embeddings"] == 32768
    assert values["num_hidden_layers"] == 3
    assert values["sliding_window_pattern"] is None
    assert "generation_config.json" not in files


def test_the_ids_of_another_tokenizer_take_the_place_of_the_folders(filled, tmp_path):
    folder = publish(tmp_path / "model", CONFIGS["Gemma 3"], GENERATION)
    files = exported(filled, folder, "data=stdlib", "data.tokenizer=bytes")
    ids = {"bos_token_id": 256, "eos_token_id": 256, "pad_token_id": None}
    assert files["generation_config.json"] == {**GENERATION, **ids}
    assert ids.items() <= files["config.json"].items()


def test_ids_hold_if_one_of_them_separates_documents():
    published = Published(CONFIGS["Llama 3.1"])
    ids = {"bos_token_id": 128, "eos_token_id": [129, 130, 131]}
    tokens = {"bos_token_id": 128, "eos_token_id": 128}
    assert published.token_ids(tokens) == ids
    assert Published().token_ids(tokens) == {**tokens, "pad_token_id": None}


def test_a_model_without_a_folder_has_the_context_that_it_was_trained_on():
    config = Published(CONFIGS["Qwen 3"])
    decoder = compose(["model=tiny"], configs_dir()).config.model.config
    assert Published().config_values(decoder, {}, length=16).items() >= {
        ("max_position_embeddings", 16)
    }
    assert config.config_values(decoder, {}, length=16)["max_position_embeddings"] == (
        40960
    )


@pytest.mark.parametrize("text", ["{", "[]", '{"a": NaN}'])
def test_a_malformed_generation_config_is_refused(tmp_path, text):
    folder = publish(tmp_path / "model", CONFIGS["Qwen 3"])
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(ModelFolderError, match=r"generation_config\.json cannot be"):
        published_texts(folder)


@pytest.mark.parametrize(
    ("length", "sizes", "most"),
    [
        (32, {}, None),
        (33, {}, 32),
        (33, {"rope_scale_global": 8.0}, 32),  # Gemma 3: linear, after scaling
        # Llama 3.1: the number in the file is that after scaling.
        (32, {"rope_scale_global": 4.0, "rope_original_length": 8}, None),
        (33, {"rope_scale_global": 4.0, "rope_original_length": 8}, 32),
        # Qwen with YaRN: the number in the file is that before.
        (128, {"rope_scale_global": 4.0, "rope_original_length": 32}, None),
        (129, {"rope_scale_global": 4.0, "rope_original_length": 32}, 128),
    ],
)
def test_sequences_that_are_longer_than_the_model_allows_are_a_warning(
    length, sizes, most
):
    for values in (
        {"max_position_embeddings": 32},
        {"text_config": {"max_position_embeddings": 32}},
    ):
        text = Published(values).excess_length(length, SimpleNamespace(**sizes))
        assert bool(text) == (most is not None)
        assert f"use training.sequence_length={most}, " in text or not text
    for unknown in ({}, {"max_position_embeddings": None}):
        assert not Published(unknown).excess_length(length, SimpleNamespace(**sizes))
