# SPDX-License-Identifier: Apache-2.0
"""The config.json of Llama, Mistral, Qwen and OLMo: windows, scaling and defaults."""

import dataclasses
import math

import pytest

from tessera.errors import ModelFolderError, ModelShapeError
from tessera.train.models.families.registry import family_for, family_of

SIZES = {
    "vocab_size": 48,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "intermediate_size": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def read(model_type, **changes):
    values = {**SIZES, "model_type": model_type, **changes}
    return family_of(values).config(values)


def refusal(model_type, **changes):
    with pytest.raises(ModelFolderError) as caught:
        read(model_type, **changes)
    return caught.value.got


@pytest.mark.parametrize(
    ("model_type", "head_dim", "kv_heads"),
    [
        ("llama", 2, 32),
        ("mistral", 2, 8),
        ("qwen3", 128, 32),
        ("qwen3_moe", 2, 4),
        ("qwen2", 2, 32),
        ("olmo2", 2, 32),
        ("olmo3", 2, 32),
    ],
)
def test_sizes_that_are_left_out_are_those_of_transformers(
    model_type, head_dim, kv_heads
):
    config = read(model_type)
    assert (config.head_dim, config.num_kv_heads) == (head_dim, kv_heads)
    assert read(model_type, num_key_value_heads=None).num_kv_heads == 32


@pytest.mark.parametrize(
    ("keys", "window"),
    [({}, 4096), ({"sliding_window": None}, None), ({"sliding_window": 5}, 5)],
    ids=str,
)
def test_the_layers_of_a_mistral_all_have_the_window_or_none_has(keys, window):
    config = read("mistral", **keys)
    assert config.window == window
    assert {*config.layer_kinds} == {"local" if window else "global"}


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen3", "qwen2"])
def test_rotary_scaling_holds_for_layers_with_and_without_a_window(model_type):
    scaling = {"rope_type": "linear", "factor": 4.0}
    config = read(model_type, rope_theta=500.0, rope_scaling=scaling)
    assert config.rope_base_local == config.rope_base_global == 500
    assert config.rope_scale_local == config.rope_scale_global == 4
    values = family_for(config).values(config)
    assert values["rope_scaling"] == scaling
    assert values["rope_theta"] == 500


@pytest.mark.parametrize(
    ("keys", "kinds"),
    [
        ({}, "gggg"),
        ({"use_sliding_window": True}, "gggg"),
        ({"use_sliding_window": True, "max_window_layers": 0}, "llll"),
        ({"use_sliding_window": True, "max_window_layers": 3}, "gggl"),
        ({"use_sliding_window": False, "max_window_layers": 3}, "gggg"),
        (
            {
                "use_sliding_window": True,
                "max_window_layers": 3,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            "lglg",
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("model_type", ["qwen3", "qwen2"])
def test_the_windows_of_a_qwen_are_those_of_its_last_layers_or_listed(
    model_type, keys, kinds
):
    config = read(model_type, **keys)
    assert "".join(kind[0] for kind in config.layer_kinds) == kinds
    assert config.window == (4096 if keys.get("use_sliding_window") else None)
    if "l" in kinds:
        assert family_for(config).name == model_type


def test_windows_that_transformers_would_not_compute_alike_are_refused():
    sliding = ["sliding_attention"] * 4
    assert "use_sliding_window is false" in refusal("qwen3", layer_types=sliding)
    assert "use_sliding_window" in refusal("qwen3_moe", use_sliding_window=True)
    assert "layer_types" in refusal("qwen3_moe", layer_types=sliding)
    assert read("qwen3_moe", layer_types=["full_attention"] * 4).window is None
    assert "layer_types" in refusal("mistral", layer_types=sliding)
    assert "sliding_window" in refusal("llama", sliding_window=8)


def test_a_qwen_2_has_biases_of_queries_keys_and_values_alone():
    """Transformers looks at no key for it, so one that says otherwise is refused."""
    config = read("qwen2")
    assert (config.qkv_bias, config.output_bias, config.qk_norm) == (True, False, False)
    assert "attention_bias" not in family_for(config).values(config)
    assert "attention_bias" in refusal("qwen2", attention_bias=False)
    assert "use_mrope" in refusal("qwen2", use_mrope=True)


def test_an_olmo_3_has_a_window_in_three_of_four_layers():
    config = read("olmo3", rope_scaling=YARN)
    assert (config.window, config.layer_kinds) == (4096, ("local",) * 3 + ("global",))
    assert config.rope_base_local == config.rope_base_global == 500_000
    assert (config.rope_scale_local, config.rope_scale_global) == (1, 4)
    assert config.norm_epsilon == read("olmo2").norm_epsilon == 1e-5
    with pytest.raises(ModelShapeError, match="window = None"):
        read("olmo3", sliding_window=None)


def test_a_base_that_transformers_reads_for_some_layers_alone_is_refused():
    assert "rope_theta = 100.0: only 500000.0" in refusal("olmo3", rope_theta=100.0)
    kinds = ("full_attention", "sliding_attention")
    each = {kind: {"rope_type": "default", "rope_theta": 100.0} for kind in kinds}
    config = read("olmo3", rope_theta=100.0, rope_parameters=each)
    assert config.rope_base_local == config.rope_base_global == 100


def test_more_layers_than_any_model_has_are_refused_and_not_listed():
    keys = {"use_sliding_window": True, "max_window_layers": 1}
    with pytest.raises(ModelShapeError, match="num_layers"):
        read("qwen3", **keys, num_hidden_layers=10**15)


@pytest.mark.parametrize(
    "model_type", ["llama", "mistral", "qwen3", "qwen3_moe", "qwen2"]
)
@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "dynamic", "factor": 2.0},
        {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]},
        {"rope_type": "mrope", "type": "mrope", "mrope_section": [16, 24, 24]},
    ],
    ids=str,
)
def test_a_kind_of_rotary_scaling_that_is_not_computed_is_refused(model_type, scaling):
    kind = scaling.get("rope_type") or scaling["type"]
    supported = "'default' or 'linear' or 'llama3' or 'yarn'"
    assert refusal(model_type, rope_scaling=scaling) == (
        f"rope_scaling.rope_type = {kind!r}: only {supported} is supported"
    )
    assert refusal(
        model_type, rope_parameters={"rope_type": kind, **scaling}
    ).startswith(f"rope_parameters.rope_type = {kind!r}: only")


@pytest.mark.parametrize(
    ("scaling", "line"),
    [
        (
            {"rope_type": "yarn", "factor": 4.0},
            "rope_scaling.original_max_position_embeddings = None: yarn needs it",
        ),
        (
            {**YARN, "beta_slow": 40.0},
            "rope_scaling.beta_slow = 40.0: not below beta_fast = 32.0",
        ),
    ],
    ids=str,
)
def test_rotary_scaling_is_refused_in_the_names_of_the_folder(scaling, line):
    assert refusal("llama", rope_scaling=scaling) == line


def test_a_number_that_no_float_has_is_refused():
    line = refusal("llama", rms_norm_eps=10**400)
    assert line.startswith("rms_norm_eps = 1000")
    assert line.endswith(": too large")


def test_scaling_by_one_is_none():
    config = read("llama", rope_scaling={**YARN, "factor": 1.0})
    assert config == read("llama")


@pytest.mark.parametrize(
    ("keys", "factor"),
    [
        ({}, None),
        ({"mscale": 2.0}, None),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        (
            {"mscale": 2.0, "mscale_all_dim": 0.5},
            (0.2 * math.log(4) + 1) / (0.05 * math.log(4) + 1),
        ),
        ({"mscale": 2.0, "mscale_all_dim": 0.5, "attention_factor": 3.0}, 3.0),
        ({"mscale": 2.0, "mscale_all_dim": 0.5, "factor": 0.5}, 1.0),
    ],
    ids=str,
)
def test_the_attention_factor_of_yarn_comes_from_one_key_or_two(keys, factor):
    config = read("llama", rope_parameters={**YARN, **keys})
    assert config.rope_attention_factor == pytest.approx(factor)


def test_a_width_that_is_no_multiple_of_the_heads_is_written_as_a_mistral():
    """Transformers loads no such Llama; without windows, Mistral is the same model."""
    config = dataclasses.replace(read("llama", head_dim=8), d_model=36)
    family = family_for(config)
    assert family.name == "mistral"
    assert family.values(config)["head_dim"] == 8
    assert family.values(config)["sliding_window"] is None
