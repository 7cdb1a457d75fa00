# SPDX-License-Identifier: Apache-2.0
import dataclasses
import math
from pathlib import Path

import jax
import pytest
from flax import nnx
from omegaconf import OmegaConf

from tessera.errors import ModelShapeError, UnknownModelError
from tessera.models import CONFIGS, DecoderConfig, DecoderModel, build, config_of

FILES = Path(__file__).parents[3] / "configs" / "model"

# Of the published checkpoints. The 4B holds 4,300,079,472 with its image encoder
# (416,866,032) and projector (2,950,272). For its text part one also meets
# 3,880,099,328: that leaves out the 64 rows of image tokens in the embedding, of 2560
# each, which the checkpoint has.
PUBLISHED = {
    "gemma3_270m": 268_098_176,
    "gemma3_1b": 999_885_952,
    "gemma3_4b": 4_300_079_472 - 416_866_032 - 2_950_272,
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_analytic_count_is_that_of_the_parameters(name: str) -> None:
    config = config_of(name)
    shapes = jax.tree.leaves(DecoderModel(config).abstract())
    assert config.num_params == sum(math.prod(leaf.shape) for leaf in shapes)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_count_is_the_published_one(name: str) -> None:
    assert config_of(name).num_params == PUBLISHED[name]


def test_norm_scales_are_counted_apart() -> None:
    shapes = jax.tree_util.tree_leaves_with_path(
        DecoderModel(config_of("tiny")).abstract()
    )
    scales = [leaf for path, leaf in shapes if "scale" in jax.tree_util.keystr(path)]
    expected = sum(math.prod(leaf.shape) for leaf in scales)
    assert config_of("tiny").num_norm_params == expected


def test_every_sixth_layer_is_global() -> None:
    config = config_of("gemma3_270m")
    layers = [i for i in range(config.num_layers) if config.is_global(i)]
    assert layers == [5, 11, 17]


@pytest.mark.parametrize("name", CONFIGS)
def test_tiny_and_its_siblings_fit_four_tensor_parallel_devices(name: str) -> None:
    config = config_of(name)
    assert config.num_heads % 4 == config.mlp_dim % 4 == config.vocab_size % 4 == 0


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_file_says_what_the_registry_says(name: str) -> None:
    given = OmegaConf.to_container(OmegaConf.load(FILES / f"{name}.yaml"))
    assert isinstance(given, dict)
    assert given.pop("name") == name
    assert given.pop("mesh_shape") == [[1, 1], ["fsdp", "tp"]]
    assert given.pop("sequence_parallel") is False
    assert given.pop("context_parallel") == "ring"
    assert DecoderConfig(**given) == config_of(name)


@pytest.mark.parametrize(
    "path", sorted(FILES.glob("*.yaml")), ids=lambda path: path.stem
)
def test_a_model_file_opens_with_what_to_expect(path: Path) -> None:
    assert path.stem in CONFIGS
    head = path.read_text().split("\n\n")[0]
    assert all(
        f"# {word}: " in head
        for word in ("Reproduces", "Hardware", "Expect", "Command")
    )


def test_contradicting_sizes_are_told_all_at_once() -> None:
    with pytest.raises(ModelShapeError) as caught:
        dataclasses.replace(config_of("tiny"), num_kv_heads=3, head_dim=33)
    assert str(caught.value) == (
        "[T405] these sizes do not make a model\n"
        "  got: num_heads = 4, num_kv_heads = 3, remainder 1\n"
        "  got: head_dim = 33 is odd, but rope rotates halves\n"
        "  fix: use num_kv_heads 2 or 4\n"
        "  fix: use head_dim 32 or 34\n"
        "  docs: docs/errors/T405.md"
    )


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf])
def test_sizes_are_positive_numbers(value: float) -> None:
    with pytest.raises(ModelShapeError) as caught:
        dataclasses.replace(config_of("tiny"), window=value)
    assert str(caught.value) == (
        "[T405] these sizes do not make a model\n"
        f"  got: window = {value!r} is not a positive number\n"
        "  fix: use window 1 or more\n"
        "  docs: docs/errors/T405.md"
    )


def test_an_unknown_model_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownModelError) as caught:
        config_of("gema3_1b")
    assert str(caught.value) == (
        "[T403] there is no model 'gema3_1b'\n"
        "  fix: did you mean 'gemma3_1b'? Known: 'tiny', 'moe_tiny', 'gemma3_270m', "
        "'gemma3_1b', 'gemma3_4b'\n"
        "  docs: docs/errors/T403.md"
    )


def test_build_takes_a_name_or_a_configuration() -> None:
    key = jax.random.key(0)
    by_name = nnx.eval_shape(lambda: build("tiny", key))
    by_config = nnx.eval_shape(lambda: build(config_of("tiny"), key))
    assert nnx.state(by_name) == nnx.state(by_config)
    with pytest.raises(UnknownModelError):
        build("small", key)


@pytest.mark.parametrize("base", ["rope_base_local", "rope_base_global"])
def test_yarn_needs_a_base_above_one(base: str) -> None:
    yarn = {"rope_kind": "yarn", "rope_scale_global": 4.0, "rope_original_length": 32}
    with pytest.raises(ModelShapeError, match=r"a base of 1\.0"):
        dataclasses.replace(config_of("tiny"), **yarn, **{base: 1.0})
