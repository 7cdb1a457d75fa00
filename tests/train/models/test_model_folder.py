# SPDX-License-Identifier: Apache-2.0
"""Weights of Hugging Face folders: any files, names, dtypes and mesh; or one error."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from tessera.errors import ModelFolderError, WeightFileError
from tessera.mesh import Mesh
from tessera.train.models import DecoderModel, config_of, from_pretrained
from tessera.train.models.pipeline_stages import StageSplit
from tessera.train.models.weights import import_weights
from tests.train.models.published_folders import (
    GEMMA3,
    gemma3_tensors,
    tensor,
    write_folder,
)

TENSORS = gemma3_tensors()
INDEX = "model.safetensors.index.json"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "folder"


def expected_params(tensors=TENSORS):
    """The parameters, by arithmetic that is written out here."""
    heads, kv_heads, head_dim = 4, 2, 6

    def stack(name, *shape):
        layers = [tensors[f"model.layers.{i}.{name}.weight"] for i in range(3)]
        if shape:
            layers = [layer.T.reshape(shape) for layer in layers]
        return np.stack(layers).astype(np.float32)

    def kernel(name, *shape):
        return {"kernel": stack(name, *shape)}

    def scale(name):
        return {"scale": stack(name)}

    return {
        "embedding": tensors["model.embed_tokens.weight"].astype(np.float32),
        "final_norm": {"scale": tensors["model.norm.weight"].astype(np.float32)},
        "decoder": {
            "pre_attention_norm": scale("input_layernorm"),
            "post_attention_norm": scale("post_attention_layernorm"),
            "pre_mlp_norm": scale("pre_feedforward_layernorm"),
            "post_mlp_norm": scale("post_feedforward_layernorm"),
            "attention": {
                "query": kernel("self_attn.q_proj", 16, heads, head_dim),
                "key": kernel("self_attn.k_proj", 16, kv_heads, head_dim),
                "value": kernel("self_attn.v_proj", 16, kv_heads, head_dim),
                "output": kernel("self_attn.o_proj", heads, head_dim, 16),
                "query_norm": scale("self_attn.q_norm"),
                "key_norm": scale("self_attn.k_norm"),
            },
            "mlp": {
                "gate": kernel("mlp.gate_proj", 16, 32),
                "up": kernel("mlp.up_proj", 16, 32),
                "down": kernel("mlp.down_proj", 32, 16),
            },
        },
    }


def assert_same(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("shards", [1, 3])
def test_one_file_or_many_are_the_parameters(folder, shards):
    model, params = from_pretrained(write_folder(folder, TENSORS, shards=shards))
    assert model.config.num_layers == 3
    assert_same(params, expected_params())


@pytest.mark.parametrize(
    ("axes", "sizes"), [("fsdp", (4,)), ("fsdp tp", (2, 2)), ("tp pp", (2, 2))]
)
def test_each_device_has_its_slices_on_any_mesh(folder, axes, sizes):
    mesh = Mesh(axes.split(), range(4), sizes)
    model, params = from_pretrained(write_folder(folder, TENSORS), mesh)
    assert_same(params, expected_params())
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, params)
    assert specs == model.layouts(mesh)


@pytest.mark.parametrize(
    "layers",
    [(range(1), range(1, 3)), (range(1), range(1, 2), range(2, 3), range(3, 3))],
    ids=["padding", "two chunks"],
)
def test_stages_have_their_layers_and_zeros_for_padding(folder, layers):
    config = from_pretrained(write_folder(folder, TENSORS))[0].config
    model = DecoderModel(config, split=StageSplit(2, layers))
    mesh = Mesh(["pp", "fsdp"], range(4), (2, 2))
    params = import_weights(folder, model, mesh)
    assert_same(params, jax.tree.map(np.asarray, model.stored(expected_params())))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16])
def test_narrow_dtypes_are_widened_exactly(folder, dtype):
    tensors = gemma3_tensors(dtype=dtype)
    _, params = from_pretrained(write_folder(folder, tensors))
    assert_same(params, expected_params(tensors))


def test_parameters_are_rounded_to_the_dtype_asked_for(folder):
    _, params = from_pretrained(write_folder(folder, TENSORS), dtype="bf16")
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), expected_params())
    assert_same(params, rounded)


@pytest.mark.parametrize(
    "prefix", ["language_model.model.", "model.language_model.", ""]
)
def test_prefixes_of_other_classes_are_known(folder, prefix):
    renamed = {
        prefix + name.removeprefix("model."): value for name, value in TENSORS.items()
    }
    values = dict(GEMMA3)
    if prefix:
        values = {"model_type": "gemma3", "text_config": GEMMA3, "vision_config": {}}
        renamed["vision_tower.patch.weight"] = tensor("patch", (3, 3))
    _, params = from_pretrained(write_folder(folder, renamed, values, shards=2))
    assert_same(params, expected_params())


def test_a_tied_head_may_be_there_if_it_is_equal(folder):
    table = TENSORS["model.embed_tokens.weight"]
    write_folder(folder, TENSORS | {"lm_head.weight": table.copy()})
    assert_same(from_pretrained(folder)[1], expected_params())
    other = table.copy()
    other[-1, -1] += 1
    write_folder(folder, TENSORS | {"lm_head.weight": other})
    assert problems(folder) == [
        "lm_head.weight: differs from model.embed_tokens.weight, to which it is tied"
    ]


def test_frequencies_that_older_folders_store_are_skipped(folder):
    stored = {
        f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(3, np.float32)
        for i in range(3)
    }
    write_folder(folder, TENSORS | stored, shards=2)
    assert_same(from_pretrained(folder)[1], expected_params())


def problems(folder):
    with pytest.raises(WeightFileError) as caught:
        from_pretrained(folder)
    return caught.value.got.splitlines()


def test_all_that_does_not_fit_is_one_error_in_their_names(folder):
    tensors = dict(TENSORS)
    del tensors["model.norm.weight"]
    tensors[Q_PROJ] = tensors[Q_PROJ].T.copy()
    tensors["model.layers.3.mlp.up_proj.weight"] = tensor("x", (32, 16))
    tensors["model.layers.0.mlp.up_proj.weight"] = np.ones((32, 16), np.int8)
    write_folder(folder, tensors, shards=2)
    assert problems(folder) == [
        "model.layers.0.mlp.up_proj.weight: the folder has I8[32, 16], "
        "the model F32[32, 16]",
        f"{Q_PROJ}: the folder has F32[16, 24], the model F32[24, 16]",
        "model.layers.3.mlp.up_proj.weight: the folder has F32[32, 16], "
        "the model nothing",
        "model.norm.weight: the folder has nothing, the model F32[16]",
    ]


def test_a_tensor_in_two_files_is_refused(folder):
    write_folder(folder, TENSORS, shards=2)
    second = folder / "model-00002-of-00002.safetensors"
    tensors = safetensors.numpy.load_file(second)
    safetensors.numpy.save_file(
        tensors | {"model.embed_tokens.weight": TENSORS["model.embed_tokens.weight"]},
        second,
    )
    assert problems(folder) == [
        "model.embed_tokens.weight: in model-00002-of-00002.safetensors, and in "
        "model-00001-of-00002.safetensors as model.embed_tokens.weight"
    ]


def test_two_names_of_one_tensor_are_refused(folder):
    twin = {"norm.weight": TENSORS["model.norm.weight"]}
    write_folder(folder, TENSORS | twin)
    assert problems(folder) == [
        "norm.weight: in model.safetensors, and in model.safetensors as "
        "model.norm.weight"
    ]


def change_index(folder, name, file):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][name] = file
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    "file", ["../model.safetensors", "/etc/passwd", "..", "", "a/b", 3, None, ["x"]]
)
def test_the_index_names_files_of_the_folder_only(folder, file):
    write_folder(folder, TENSORS, shards=2)
    change_index(folder, Q_PROJ, file)
    with pytest.raises(WeightFileError, match=r"no usable model\.safetensors"):
        from_pretrained(folder)


def test_a_file_that_is_not_there_is_named(folder):
    write_folder(folder, TENSORS, shards=2)
    change_index(folder, Q_PROJ, "model-00003-of-00002.safetensors")
    with pytest.raises(WeightFileError, match=r"model-00003-of-00002\.safetensors"):
        from_pretrained(folder)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"weight_map": []}'])
def test_a_malformed_index_is_refused(folder, content):
    write_folder(folder, TENSORS, shards=2)
    (folder / INDEX).write_bytes(content)
    with pytest.raises(WeightFileError, match="no usable"):
        from_pretrained(folder)


def test_one_file_and_an_index_are_ambiguous(folder):
    write_folder(folder, TENSORS, shards=2)
    write_folder(folder, TENSORS)
    with pytest.raises(WeightFileError, match=r"model\.safetensors is there, too"):
        from_pretrained(folder)


@pytest.mark.parametrize("size", [0, 7, 100, -1])
def test_a_truncated_file_is_refused(folder, size):
    write_folder(folder, TENSORS, shards=2)
    file = folder / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(WeightFileError, match="not a readable safetensors file"):
        from_pretrained(folder)


def test_files_of_pytorch_are_not_read(folder):
    write_folder(folder, TENSORS)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(WeightFileError, match=r"\(\.bin\) are not read"):
        from_pretrained(folder)


def test_a_folder_of_another_configuration_is_refused(folder):
    """The shapes are the same: the numbers would be wrong without an error."""
    values = {**GEMMA3, "rms_norm_eps": 1e-5, "sliding_window": 9}
    write_folder(folder, TENSORS, values)
    config = from_pretrained(write_folder(folder.with_name("b"), TENSORS))[0].config
    with pytest.raises(ModelFolderError) as caught:
        import_weights(folder, DecoderModel(config))
    assert caught.value.got.splitlines() == [
        "this model has window = 8, not 9",
        "this model has norm_epsilon = 1e-06, not 1e-05",
    ]


def test_a_folder_without_a_configuration_is_no_model(tmp_path):
    with pytest.raises(ModelFolderError, match="No such file"):
        from_pretrained(tmp_path)
    with pytest.raises(ModelFolderError, match="No such file"):
        import_weights(tmp_path, DecoderModel(config_of("tiny")))
