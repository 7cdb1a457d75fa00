# SPDX-License-Identifier: Apache-2.0
"""A folder that is read and written again has the same bytes for every tensor."""

import dataclasses
import json

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from tessera.errors import ModelFolderError, OutputPathError
from tessera.mesh import Mesh
from tessera.train.models import DecoderModel, from_pretrained, save_pretrained
from tessera.train.models.pipeline_stages import StageSplit
from tessera.train.models.weights import import_weights
from tessera.train.models.write_folder import write_folder as export_folder
from tests.train.models.published_folders import GEMMA3, gemma3_tensors, write_folder


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "published", gemma3_tensors(), shards=2)


def tensors_of(folder):
    return {
        name: value
        for file in folder.glob("*.safetensors")
        for name, value in safetensors.numpy.load_file(file).items()
    }


def assert_same_tensors(folder, expected):
    tensors = tensors_of(folder)
    assert tensors.keys() == expected.keys()
    for name, value in expected.items():
        assert tensors[name].dtype == value.dtype
        assert tensors[name].shape == value.shape
        assert tensors[name].tobytes() == value.tobytes()


@pytest.mark.slow(reason="its first case compiles what the others share")
@pytest.mark.parametrize(
    ("axes", "sizes"), [("fsdp tp", (2, 2)), ("pp fsdp", (2, 2)), ("", ())]
)
def test_a_round_trip_has_the_same_bits_on_any_mesh(folder, tmp_path, axes, sizes):
    mesh = Mesh(axes.split(), range(4), sizes) if axes else None
    model = from_pretrained(folder)[0]
    if "pp" in axes:
        model = DecoderModel(model.config, split=StageSplit.of(model.config, 2))
    params = import_weights(folder, model, mesh)
    nbytes = save_pretrained(params, tmp_path / "again", model=model)
    assert_same_tensors(tmp_path / "again", gemma3_tensors())
    assert nbytes == sum(value.nbytes for value in gemma3_tensors().values())
    again, _ = from_pretrained(tmp_path / "again")
    assert again.config == model.config


def test_what_the_folder_says_beside_the_model_is_written_again(tmp_path):
    values = {**GEMMA3, "max_position_embeddings": 32768, "eos_token_id": [1, 106]}
    folder = write_folder(tmp_path / "a", gemma3_tensors(), values)
    (folder / "generation_config.json").write_text('{"top_k": 64}')
    model, params = from_pretrained(folder)
    save_pretrained(params, tmp_path / "b", model=model, published=folder)
    again = {
        path.name: json.loads(path.read_text()) for path in tmp_path.glob("b/*.json")
    }
    assert again["config.json"].items() >= (values | {"dtype": "float32"}).items()
    assert again["generation_config.json"] == {"top_k": 64}


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_narrow_tensors_come_back_in_their_dtype(tmp_path, dtype):
    narrow = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}[dtype]
    tensors = gemma3_tensors(dtype=narrow)
    model, params = from_pretrained(write_folder(tmp_path / "a", tensors))
    save_pretrained(params, tmp_path / "again", model=model, dtype=dtype)
    assert_same_tensors(tmp_path / "again", tensors)
    values = json.loads((tmp_path / "again" / "config.json").read_text())
    assert values["dtype"] == {"bf16": "bfloat16", "f16": "float16"}[dtype]


def test_large_weights_are_in_several_files_with_an_index(folder, tmp_path):
    model, params = from_pretrained(folder)
    again = tmp_path / "again"
    nbytes = save_pretrained(params, again, model=model, shard_bytes=8000)
    index = json.loads((again / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == nbytes
    files = sorted(again.glob("*.safetensors"))
    assert len(files) > 3
    assert {file.name for file in files} == {*index["weight_map"].values()}
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    for file in files:
        parts = safetensors.numpy.load_file(file).values()
        assert len(parts) == 1 or sum(part.nbytes for part in parts) <= 8000
    assert_same_tensors(again, gemma3_tensors())
    reread = from_pretrained(again)[1]
    jax.tree.map(np.testing.assert_array_equal, reread, params)


def test_other_files_may_be_in_folders_of_their_own(tmp_path):
    file = tmp_path / "tools.jinja"
    file.write_text("{{ tools }}")
    config = from_pretrained(write_folder(tmp_path / "a", gemma3_tensors()))[0].config
    export_folder(
        tmp_path / "b", config, {}, lambda name: name, files={"more/tools.jinja": file}
    )
    assert (tmp_path / "b" / "more" / "tools.jinja").read_text() == "{{ tools }}"


def test_nothing_is_overwritten(folder, tmp_path):
    model, params = from_pretrained(folder)
    before = sorted(folder.iterdir())
    with pytest.raises(OutputPathError, match="is not empty"):
        save_pretrained(params, folder, model=model)
    assert sorted(folder.iterdir()) == before


def test_a_failed_export_leaves_nothing(folder, tmp_path):
    model, params = from_pretrained(folder)
    params["decoder"]["mlp"]["down"]["kernel"].delete()
    with pytest.raises(RuntimeError):
        save_pretrained(params, tmp_path / "again", model=model)
    assert [path.name for path in tmp_path.iterdir()] == ["published"]


def test_a_model_of_no_family_is_refused_before_anything_is_written(folder, tmp_path):
    model, params = from_pretrained(folder)
    other = dataclasses.replace(model.config, num_experts=2)
    with pytest.raises(ModelFolderError, match="num_experts = 2, not 0"):
        save_pretrained(params, tmp_path / "again", model=DecoderModel(other))
    assert not (tmp_path / "again").exists()
