# SPDX-License-Identifier: Apache-2.0
import dataclasses
import math
from typing import Any

import pytest

from tessera.errors import ModelShapeError, UnknownModelError
from tessera.train.models import DecoderModel, config_of, model_names
from tessera.train.models.families.registry import family_for
from tessera.train.models.named_models import configs_dir

# Of the published checkpoints, with a tied head counted once. Those of Gemma 3 from 4B
# up hold an image encoder and a projector of 1152 * d_model + 1152, too. For their text
# parts one also meets smaller numbers, 3,880,099,328 for the 4B: these leave out the 64
# rows of image tokens in the embedding, which the checkpoints have.
ENCODER = 416_866_032
PUBLISHED = {
    "gemma3_270m": 268_098_176,
    "gemma3_1b": 999_885_952,
    "gemma3_4b": 4_300_079_472 - ENCODER - 2_950_272,
    "gemma3_12b": 12_187_325_040 - ENCODER - 4_424_832,
    "gemma3_27b": 27_432_406_640 - ENCODER - 6_194_304,
    "llama3.2_1b": 1_235_814_400,
    "llama3.2_3b": 3_212_749_824,
    "llama3.1_8b": 8_030_261_248,
    "llama3.1_70b": 70_553_706_496,
    "mistral_7b": 7_241_732_096,
    "mistral_7b_v0.3": 7_248_023_552,
    "qwen3_0.6b": 596_049_920,
    "qwen3_1.7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen2.5_0.5b": 494_032_768,
    "qwen2.5_1.5b": 1_543_714_304,
    "qwen2.5_3b": 3_085_938_688,
    "qwen2.5_7b": 7_615_616_512,
    "olmo2_1b": 1_484_916_736,
    "olmo2_7b": 7_298_617_344,
    "olmo2_13b": 13_716_198_400,
    "olmo2_32b": 32_234_279_936,
    "phi4": 14_659_507_200,
    "gpt_oss_20b": 20_914_757_184,
    "gpt_oss_120b": 116_829_156_672,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_count_is_the_published_one(name: str) -> None:
    assert DecoderModel(config_of(name)).num_params == PUBLISHED[name]


def test_all_models_but_the_tiny_ones_are_published() -> None:
    assert {*model_names()} == PUBLISHED.keys() | {"tiny", "moe_tiny"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_the_features_of_its_family(name: str) -> None:
    config = config_of(name)
    family = "qwen3_moe" if config.num_experts else name.partition("_")[0]
    if family in ("mistral", "phi4") and config.window is None:
        family = "llama3"  # the same architecture
    family = "gpt_oss" if config.attention_sinks else family
    assert family_for(config).name == family.partition(".")[0]


def test_every_sixth_layer_is_global() -> None:
    config = config_of("gemma3_270m")
    layers = [i for i in range(config.num_layers) if config.is_global(i)]
    assert layers == [5, 11, 17]


@pytest.mark.parametrize("name", model_names())
def test_tiny_and_its_siblings_fit_four_tensor_parallel_devices(name: str) -> None:
    config = config_of(name)
    assert name == "qwen2.5_0.5b" or config.num_heads % 4 == 0  # it has 14
    assert config.mlp_dim % 4 == config.vocab_size % 4 == 0


@pytest.mark.parametrize("name", model_names())
def test_a_model_file_opens_with_what_to_expect(name: str) -> None:
    head = (configs_dir() / "model" / f"{name}.yaml").read_text().split("\n\n")[0]
    assert all(
        f"# {word}: " in head
        for word in ("Reproduces", "Hardware", "Expect", "Command")
    )
    assert f" {DecoderModel(config_of(name)).num_params:,} parameters" in head
    assert name == "tiny" or f" model={name}" in head


@pytest.mark.parametrize("key", ["num_layer", "d_modell"])
def test_a_key_that_no_model_has_is_an_error(key: str, tmp_path, monkeypatch) -> None:
    (tmp_path / "model").mkdir()
    text = (configs_dir() / "model" / "tiny.yaml").read_text()
    (tmp_path / "model" / "other.yaml").write_text(f"{text}{key}: 2\n")
    monkeypatch.setattr(
        "tessera.train.models.named_models.configs_dir", lambda: tmp_path
    )
    with pytest.raises(ModelShapeError, match=key):
        config_of("other")


def test_contradicting_sizes_are_told_all_at_once() -> None:
    with pytest.raises(ModelShapeError) as caught:
        dataclasses.replace(config_of("tiny"), num_kv_heads=3, head_dim=33)
    assert str(caught.value) == (
        "[T405] these sizes do not make a model\n"
        "  got: num_heads = 4, num_kv_heads = 3, remainder 1\n"
        "  got: head_dim = 33 is odd, but rope rotates halves\n"
        "  fix: use num_kv_heads 2 or 4\n"
        "  fix: use head_dim 32 or 34\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T405.html"
    )


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf])
def test_sizes_are_positive_numbers(value: float) -> None:
    with pytest.raises(ModelShapeError) as caught:
        dataclasses.replace(config_of("tiny"), window=value)
    assert str(caught.value) == (
        "[T405] these sizes do not make a model\n"
        f"  got: window = {value!r} is not a positive number\n"
        "  fix: use window 1 or more\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T405.html"
    )


def test_an_unknown_model_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownModelError) as caught:
        config_of("gema3_1b")
    assert str(caught.value) == (
        "[T403] there is no model 'gema3_1b'\n"
        f"  fix: did you mean 'gemma3_1b'? Known: {str(model_names())[1:-1]}\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T403.html"
    )


@pytest.mark.parametrize("base", ["rope_base_local", "rope_base_global"])
def test_yarn_needs_a_base_above_one(base: str) -> None:
    yarn = {"rope_kind": "yarn", "rope_scale_global": 4.0, "rope_original_length": 32}
    with pytest.raises(ModelShapeError, match=r"a base of 1\.0"):
        dataclasses.replace(config_of("tiny"), **yarn, **{base: 1.0})


LONGROPE = {
    "rope_kind": "longrope",
    "rope_original_length": 64,
    "rope_short_factors": (1.0,) * 16,
    "rope_long_factors": (2.0,) * 16,
}


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"rope_dims": 3}, "rope_dims = 3, head_dim = 32"),
        ({"rope_dims": 34}, "rope_dims = 34, head_dim = 32"),
        ({"rope_long_factors": (1.0,)}, "rope_long_factors = .*, rope_kind = 'linear'"),
        (LONGROPE | {"rope_scale_global": 2.0}, "a scale of the context"),
        (LONGROPE | {"rope_original_length": None}, "rope_original_length = None"),
        (LONGROPE | {"rope_short_factors": None}, r"rope_short_factors = \[\]"),
        (LONGROPE | {"rope_dims": 16}, "rope_short_factors = "),
        (LONGROPE | {"rope_long_factors": (0.0,) * 16}, "rope_long_factors = "),
    ],
    ids=str,
)
def test_rotary_settings_that_do_not_fit_are_refused(change: Any, line: str) -> None:
    dataclasses.replace(config_of("tiny"), **LONGROPE)
    with pytest.raises(ModelShapeError, match=line):
        dataclasses.replace(config_of("tiny"), **change)


def test_one_norm_of_all_heads_needs_norms_of_queries_and_keys() -> None:
    with pytest.raises(ModelShapeError, match="qk_norm_joint = True, qk_norm = False"):
        dataclasses.replace(config_of("tiny"), qk_norm=False, qk_norm_joint=True)


@pytest.mark.parametrize("name", ["renormalize_experts", "expert_biases"])
def test_a_feature_of_experts_needs_some(name: str) -> None:
    tiny = config_of("tiny")
    change = {name: not getattr(tiny, name)}
    with pytest.raises(ModelShapeError, match=f"{name} = .*, num_experts = 0"):
        dataclasses.replace(tiny, **change)
