# SPDX-License-Identifier: Apache-2.0
"""The config.json of Gemma 3 in its spellings; what is not understood is an error."""

import dataclasses
import json

import pytest

from tessera.errors import ModelFolderError, ModelShapeError
from tessera.train.models import DecoderConfig, config_of, model_names
from tessera.train.models.families.gemma import GEMMA3
from tessera.train.models.families.registry import (
    differences,
    family_for,
    family_of,
    read_config_file,
)
from tests.train.models import published_folders

VALUES = published_folders.GEMMA3
CONFIG = DecoderConfig(
    vocab_size=48,
    d_model=16,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    mlp_dim=32,
    window=8,
    query_pre_attn_scalar=6,
    global_every=2,
    rope_scale_global=8.0,
)
PUBLISHED = [CONFIG, *(config_of(n) for n in model_names() if n != "moe_tiny")]
# What google/gemma-3-4b-it has for its text model: all else is the class's default.
GEMMA3_4B = {
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "model_type": "gemma3_text",
    "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}


def read(**changes):
    values = {**VALUES, **changes}
    absent = [name for name, value in values.items() if value is ...]
    for name in absent:
        del values[name]
    return family_of(values).config(values)


def refusal(**changes):
    with pytest.raises(ModelFolderError) as caught:
        read(**changes)
    return caught.value.got


OLDER_ROPE = {
    "rope_parameters": ...,
    "rope_theta": 1e6,
    "rope_local_base_freq": 10_000,
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {**OLDER_ROPE, "rope_scaling": {"rope_type": "linear", "factor": 8}},
        {**OLDER_ROPE, "rope_scaling": {"type": "linear", "factor": 8.0}},
        {"layer_types": ..., "sliding_window_pattern": 2},
        {"layer_types": None, "sliding_window_pattern": 2},
        {"_sliding_window_pattern": 6},
        {"sliding_window_pattern": 0},
        {"dtype": ..., "torch_dtype": "float32"},
        {"use_bidirectional_attention": None, "attn_logit_softcapping": None},
        {"rope_scaling": None, "attention_dropout": 0},
        {"a_new_key": None},
    ],
    ids=str,
)
def test_older_and_current_keys_say_the_same(changes):
    assert read(**changes) == CONFIG


def test_defaults_are_those_of_transformers():
    values = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "image_token_index": 262_144,
        "vision_config": {"hidden_size": 1152},
        "text_config": GEMMA3_4B,
    }
    assert family_of(values).config(values) == config_of("gemma3_4b")


def test_layers_in_any_order_are_read():
    order = ["full_attention", "full_attention", "sliding_attention"]
    assert read(layer_types=order).layer_kinds == ("global", "global", "local")


GEMMA2 = {
    "model_type": "gemma2",
    **{key: VALUES[key] for key in ("vocab_size", "hidden_size", "intermediate_size")},
    **{"num_hidden_layers": 3, "num_attention_heads": 8},
}


def test_keys_that_a_gemma2_leaves_out_have_the_values_of_transformers():
    config = family_of(GEMMA2).config(GEMMA2)
    assert (config.attention_soft_cap, config.logit_soft_cap) == (50, 30)
    assert (config.num_kv_heads, config.head_dim, config.window) == (4, 256, 4096)
    assert config.layer_kinds == ("local", "global", "local")
    assert config.tied_head


def test_a_gemma2_without_soft_caps_has_none():
    caps = dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"))
    config = family_of(GEMMA2).config({**GEMMA2, **caps})
    assert config.attention_soft_cap is config.logit_soft_cap is None
    assert family_for(config).name == "gemma2"


def test_rope_without_scaling_is_not_scaled():
    assert read(**OLDER_ROPE, rope_scaling=None).rope_scale_global == 1


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping = 30.0: only"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ({"hidden_activation": "relu"}, "hidden_activation = 'relu': only"),
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1: only"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings = False"),
        ({"quantization_config": {"bits": 4}}, "quantization_config = {'bits': 4}: "),
        ({"hidden_size": "16"}, "hidden_size = '16': not a int"),
        ({"hidden_size": True}, "hidden_size = True: not a int"),
        ({"rms_norm_eps": [1]}, "rms_norm_eps = [1]: not a float"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types = "),
        ({"sliding_window": None}, "sliding_window = None: local layers need"),
        ({"layer_types": ["full_attention"] * 2 + ["chunked"]}, "layer_types = "),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            "rope_parameters.rope_type = 'default': this key is unknown",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2}}},
            "rope_type = 'yarn': only",
        ),
        (
            {
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "linear", "factor": 8.0}
                }
            },
            "rope_type = 'linear': only 'default'",
        ),
        (
            {"rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}}},
            "partial_rotary_factor = 0.5: this key is unknown",
        ),
        ({"rope_scaling": {"factor": 4.0}}, "factor is 8.0 elsewhere"),
        ({"rope_theta": 5e5}, "rope_theta is 1000000.0 elsewhere"),
    ],
    ids=str,
)
def test_a_key_that_changes_the_computation_is_never_ignored(changes, line):
    assert line in refusal(**changes)


def test_all_problems_are_listed_at_once():
    got = refusal(a_new_key=3, another={"x": 1}, attn_logit_softcapping=30.0)
    assert [line.split()[0] for line in got.splitlines()] == [
        "attn_logit_softcapping",
        "a_new_key",
        "another",
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 3},
        {"hidden_size": -1},
        {"vocab_size": 10**400},
        {"layer_types": None, "num_hidden_layers": 10**15},
        {"layer_types": None, "sliding_window_pattern": 0},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_sizes_are_checked_as_those_of_any_model(changes):
    with pytest.raises(ModelShapeError):
        read(**changes)


def test_an_unknown_family_names_those_that_are_known():
    with pytest.raises(ModelFolderError, match="'gemma3_text'"):
        family_of({"model_type": "gemma"})


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"a": NaN}', b"\xff"])
def test_what_is_no_configuration_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelFolderError, match="cannot be read"):
        read_config_file(tmp_path)


@pytest.mark.parametrize("config", PUBLISHED)
def test_what_is_written_reads_back(config):
    family = family_for(config)
    values = json.loads(json.dumps(family.values(config)))
    assert not differences(config, family.config(values))


def test_experts_with_the_features_of_gemma_are_refused():
    with pytest.raises(ModelFolderError, match="num_experts = 8, not 0"):
        family_for(config_of("moe_tiny"))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"query_pre_attn_scalar": 6.5}, "query_pre_attn_scalar = 6.5, not 6.0"),
        ({"d_model": 18}, "d_model = 18 is no multiple of num_heads = 4"),
    ],
)
def test_a_configuration_that_no_family_has_is_not_written(changes, line):
    with pytest.raises(ModelFolderError) as caught:
        family_for(dataclasses.replace(CONFIG, **changes))
    assert line in caught.value.got


def test_numbers_have_the_types_that_transformers_checks():
    """Settings of the command line are floats, where a file has integers."""
    config = dataclasses.replace(CONFIG, query_pre_attn_scalar=6.0)
    assert type(GEMMA3.values(config)["query_pre_attn_scalar"]) is int


def test_a_model_of_another_kind_is_not_written():
    with pytest.raises(ModelFolderError, match="its configuration is a int"):
        family_for(3)
