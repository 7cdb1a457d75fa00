# SPDX-License-Identifier: Apache-2.0
"""The folders of Phi, which have one tensor for several matmuls."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest

from tessera.errors import ModelFolderError, ModelShapeError, WeightFileError
from tessera.foundations.tree import named_leaves
from tessera.train.models import (
    DecoderModel,
    from_pretrained,
    save_pretrained,
)
from tessera.train.models.decoder.config import LoraConfig
from tessera.train.models.families.registry import differences, family_for, family_of
from tessera.train.models.model_folder import ModelFolder
from tessera.train.models.write_folder import write_adapters
from tessera.train.rollouts import generate
from tests.train.models.published_folders import tensor, write_folder

VALUES = {
    "model_type": "phi3",
    "vocab_size": 48,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "rope_theta": 500.0,
}
QKV = "model.layers.1.self_attn.qkv_proj.weight"
GATE_UP = "model.layers.1.mlp.gate_up_proj.weight"


def refusal(**changes):
    with pytest.raises(ModelFolderError) as caught:
        family_of(VALUES).config({**VALUES, **changes})
    return caught.value.got


def tensors():
    shapes = {
        "model.embed_tokens.weight": (48, 16),
        "lm_head.weight": (48, 16),
        "model.norm.weight": (16,),
    }
    for layer in range(2):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (16,),
                "post_attention_layernorm": (16,),
                "self_attn.qkv_proj": (32, 16),
                "self_attn.o_proj": (16, 16),
                "mlp.gate_up_proj": (48, 16),
                "mlp.down_proj": (16, 24),
            }.items()
        }
    return {name: tensor(name, shape) for name, shape in shapes.items()}


def test_values_that_are_left_out_are_those_of_transformers():
    config = family_of(VALUES).config(VALUES)
    assert config.norm_epsilon == 1e-5
    assert config.layer_kinds == ("global", "global")
    assert (config.qk_norm, config.qkv_bias, config.tied_head) == (False,) * 3


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        # Which Transformers takes for longrope.
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0}},
            "rope_type = 'yarn': only 'default' or 'longrope'",
        ),
        ({"attention_bias": True}, "attention_bias = True: only False"),
        ({"resid_pdrop": 0.1}, "resid_pdrop = 0.1: only 0"),
        ({"lm_head_bias": True}, "lm_head_bias = True: only 0"),
    ],
    ids=str,
)
def test_what_a_phi_computes_otherwise_is_refused(changes, line):
    assert line in refusal(**changes)


LONGROPE = {
    "original_max_position_embeddings": 32,
    "max_position_embeddings": 256,
    "partial_rotary_factor": 0.5,
    "rope_scaling": {"type": "longrope", "short_factor": [2], "long_factor": [3.5]},
}


FACTORS = {"rope_short_factors": (1.0, 1.0), "rope_long_factors": (1.0, 1.0)}


def test_longrope_is_read_in_each_spelling_and_written():
    config = family_of(VALUES).config(VALUES | LONGROPE)
    assert (config.rope_dims, config.rope_original_length) == (2, 32)
    assert (config.rope_short_factors, config.rope_long_factors) == ((2,), (3.5,))
    assert config.rope_attention_factor == pytest.approx(math.sqrt(1 + 3 / 5))
    rope = {**LONGROPE["rope_scaling"], "rope_type": "longrope"}
    current = {"rope_scaling": None, "rope_parameters": rope | {"type": None}}
    assert family_of(VALUES).config(VALUES | LONGROPE | current) == config
    family = family_for(config)
    assert family.name == "phi3"
    values = json.loads(json.dumps(family.values(config)))
    assert not differences(config, family.config(values))
    whole = dataclasses.replace(config, rope_dims=4, **FACTORS)
    assert differences(config, whole)[0] == "rope_dims = 2, not 4"


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"short_factor": [2, 3]}, "rope_short_factors = [2, 3]"),
        ({"long_factor": [-1]}, "rope_long_factors = [-1]"),
    ],
    ids=str,
)
def test_there_is_one_factor_for_each_frequency(change, line):
    values = VALUES | LONGROPE
    values = values | {"rope_scaling": {**values["rope_scaling"], **change}}
    with pytest.raises(ModelShapeError) as caught:
        family_of(values).config(values)
    assert line in caught.value.got


@pytest.mark.slow(reason="it compiles two models and a generation")
def test_rows_of_other_frequencies_are_refused():
    """In training, and in generation where the answer would pass the length."""
    model = DecoderModel(family_of(VALUES).config(VALUES | LONGROPE))
    params = model.init(jax.random.key(0))
    assert model.apply(params, np.zeros((1, 32), "i4")).shape == (1, 32, 48)
    with pytest.raises(ModelShapeError, match="33 tokens, rope_kind = 'longrope'"):
        model.apply(params, np.zeros((1, 33), "i4"))
    generate(model, params, [[1] * 30], 2, jax.random.key(0))
    with pytest.raises(ModelShapeError, match="rope_original_length = 32"):
        generate(model, params, [[1] * 30], 4, jax.random.key(0))


def test_a_tensor_is_cut_into_its_parameters_and_written_whole_again(tmp_path):
    stored = tensors()
    model, params = from_pretrained(write_folder(tmp_path / "in", stored, VALUES))
    attention = params["decoder"]["attention"]
    wanted = stored[QKV].reshape(8, 4, 16).transpose(2, 0, 1)
    heads = {"query": slice(0, 4), "key": slice(4, 6), "value": slice(6, 8)}
    for name, part in heads.items():
        np.testing.assert_array_equal(attention[name]["kernel"][1], wanted[:, part])
    mlp = params["decoder"]["mlp"]
    np.testing.assert_array_equal(mlp["gate"]["kernel"][1], stored[GATE_UP][:24].T)
    np.testing.assert_array_equal(mlp["up"]["kernel"][1], stored[GATE_UP][24:].T)
    save_pretrained(params, tmp_path / "out", model=model, published=tmp_path / "in")
    again = ModelFolder(tmp_path / "out")
    assert again.family.name == "phi3"
    assert again.arrays.keys() == stored.keys()
    for name, value in stored.items():
        np.testing.assert_array_equal(again.view(name), value)


def test_a_tensor_of_another_size_is_one_line_in_the_names_of_the_folder(tmp_path):
    stored = tensors() | {QKV: tensor("q", (31, 16))}
    with pytest.raises(WeightFileError) as caught:
        from_pretrained(write_folder(tmp_path, stored, VALUES))
    assert (
        caught.value.got == f"{QKV}: the folder has F32[31, 16], the model F32[32, 16]"
    )


def test_adapters_of_parts_of_a_matmul_are_not_written_alone(tmp_path):
    lora = LoraConfig(rank=2, targets=("o_proj", "v_proj"))
    config = dataclasses.replace(family_of(VALUES).config(VALUES), lora=lora)
    leaves = named_leaves(jax.eval_shape(DecoderModel(config).init, jax.random.key(0)))
    layouts = {
        path.replace("/", "."): (np.dtype("f4"), leaf.shape)
        for path, leaf in leaves.items()
    }

    def write(kind, config=config, layouts=layouts):
        def read(name):
            return np.zeros(layouts[name][1], np.float32)

        write_adapters(
            tmp_path / kind, config, layouts, read, base=None, model_type=kind
        )

    with pytest.raises(ModelFolderError, match="no module of its own") as caught:
        write("phi3")
    assert "attention.value" in caught.value.got
    write("llama")
    whole = {name: x for name, x in layouts.items() if "value.lora" not in name}
    write("phi3", layouts=whole)
    assert family_for(config, "phi3").name == "phi3"
