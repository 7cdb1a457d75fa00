# SPDX-License-Identifier: Apache-2.0
"""The folders of GPT-OSS: sinks, and experts with biases in tensors of two halves."""

import dataclasses

import numpy as np
import pytest

from tessera.errors import ModelFolderError, SettingConflictError
from tessera.foundations.tree import named_leaves
from tessera.mesh import Mesh
from tessera.train.models import DecoderModel, from_pretrained, save_pretrained
from tessera.train.models.families.family import StoredTensor
from tessera.train.models.families.registry import family_of
from tessera.train.models.model_folder import ModelFolder
from tests.train.models.published_folders import tensor, write_folder

VALUES = {
    "model_type": "gpt_oss",
    "vocab_size": 48,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 12,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
}
CONFIG = family_of(VALUES).config(VALUES)


def refusal(**changes):
    values = {**VALUES, **changes}
    with pytest.raises(ModelFolderError) as caught:
        family_of(values).config(values)
    return caught.value.got


def test_values_that_are_left_out_are_those_of_transformers():
    assert (CONFIG.window, CONFIG.layer_kinds) == (128, ("local", "global"))
    assert CONFIG.rope_base_local == CONFIG.rope_base_global == 150_000
    assert CONFIG.rope_scale_local == CONFIG.rope_scale_global == 32
    assert (CONFIG.qkv_bias, CONFIG.output_bias, CONFIG.tied_head) == (
        True,
        True,
        False,
    )
    assert CONFIG.norm_epsilon == 1e-5


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"quantization_config": {"quant_method": "mxfp4"}},
            "only a folder in bfloat16 can be read",
        ),
        ({"swiglu_limit": 5.0}, "swiglu_limit = 5.0: only 7.0"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha = 1.0: only 1.702"),
        ({"experts_per_token": 3}, "experts_per_token = 3: only 2"),
        ({"rope_scaling": None}, "rope_parameters = None: the kind of"),
    ],
    ids=str,
)
def test_what_is_computed_otherwise_is_refused(changes, line):
    assert line in refusal(**changes)


def test_halves_take_turns_in_a_tensor_and_each_device_has_its_own(tmp_path):
    model = DecoderModel(CONFIG)
    leaves = named_leaves(model.abstract())
    shapes = {path.replace("/", "."): leaf.shape for path, leaf in leaves.items()}
    rows = family_of(VALUES).rows(shapes)
    stored = {
        name: tensor(name, one.shape)
        for name, one in StoredTensor.all_of(rows, shapes).items()
    }
    both = "model.layers.1.mlp.experts.gate_up_proj"
    assert stored[both].shape == (4, 16, 24)
    mesh = Mesh(["fsdp", "tp"], range(4), (2, 2))
    model, params = from_pretrained(write_folder(tmp_path / "in", stored, VALUES), mesh)
    experts = params["decoder"]["experts"]
    np.testing.assert_array_equal(experts["gate"][1], stored[both][..., ::2])
    np.testing.assert_array_equal(experts["up"][1], stored[both][..., 1::2])
    biases = stored[f"{both}_bias"]
    np.testing.assert_array_equal(experts["up_bias"][1], biases[..., 1::2])
    save_pretrained(params, tmp_path / "out", model=model)
    again = ModelFolder(tmp_path / "out")
    assert again.arrays.keys() == stored.keys()
    for name, value in stored.items():
        np.testing.assert_array_equal(again.view(name), value)


def test_an_expert_that_a_token_does_not_use_is_not_counted_with_its_biases():
    model = DecoderModel(CONFIG)
    expert = 3 * 16 * 12 + 12 + 12 + 16
    assert model.num_params - model.num_active_params == 2 * 2 * expert


@pytest.mark.parametrize("method", ["ring", "all_to_all"])
def test_sequences_with_sinks_are_not_split(method):
    model = DecoderModel(CONFIG, context_parallel=method)
    with pytest.raises(SettingConflictError, match="whole sequences"):
        model.place(Mesh(["fsdp", "cp"], range(4), (2, 2)))
    without = dataclasses.replace(CONFIG, attention_sinks=False)
    DecoderModel(without).place(Mesh(["fsdp", "cp"], range(4), (2, 2)))
