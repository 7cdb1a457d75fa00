# SPDX-License-Identifier: Apache-2.0
"""LoRA: a decoder with adapters computes what its merged weights compute.

The reference is the decoder without adapters on W + s A B: its logits, and its gradient
G of W, from which the chain rule makes those of A and B, s G B^T and s A^T G.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tessera.errors import ModelShapeError, SettingValueError
from tessera.foundations.tree import named_leaves
from tessera.mesh import Mesh
from tessera.train.models import DecoderConfig, DecoderModel
from tessera.train.models.decoder.config import LoraConfig
from tessera.train.models.frozen_parameters import freeze
from tests.small_model import SMALL
from tests.train.models.decoder.lora_reference import (
    assert_same_as_merged,
    random_params,
    with_lora,
)

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
EXPERTS = dataclasses.replace(SMALL, num_experts=4, mlp_dim=16)


def names_of(config: DecoderConfig) -> set[str]:
    return {*named_leaves(DecoderModel(config).abstract())}


@pytest.mark.full
def test_logits_and_gradients_are_those_of_the_merged_weights() -> None:
    config = with_lora(SMALL, rank=3, alpha=5.0)
    assert_same_as_merged(DecoderModel(config))


@pytest.mark.full
def test_a_mesh_computes_the_same() -> None:
    mesh = Mesh(["fsdp", "tp"], devices=range(4), shape=(2, 2))
    assert_same_as_merged(DecoderModel(with_lora(SMALL, rank=2, alpha=3.0)), mesh)


@pytest.mark.full
def test_experts_keep_adapters_of_attention() -> None:
    config = with_lora(EXPERTS, rank=2)
    assert config.lora_targets == ALL[:4]
    assert_same_as_merged(DecoderModel(config))


@pytest.mark.full
def test_new_adapters_change_nothing_and_leave_the_weights_as_they_are() -> None:
    config = with_lora(SMALL, rank=4)
    params = named_leaves(DecoderModel(config).init(jax.random.key(0)))
    plain = named_leaves(DecoderModel(SMALL).init(jax.random.key(0)))
    for name, value in plain.items():
        np.testing.assert_array_equal(params[name], value, name)
    a, b = (params[f"decoder/attention/output/lora_{x}"] for x in "ab")
    assert not np.any(b)
    # As PEFT: uniform up to one over the root of the fan-in, of all heads together.
    bound = 1 / math.sqrt(SMALL.num_heads * SMALL.head_dim)
    assert 0.9 * bound < np.abs(a).max() <= bound
    assert len(np.unique(a)) == a.size


@pytest.mark.slow(reason="it initializes two models")
def test_adapters_alone_are_those_of_the_whole_model() -> None:
    model = DecoderModel(with_lora(SMALL, rank=2))
    whole = named_leaves(model.init(jax.random.key(5)))
    alone = named_leaves(model.init(jax.random.key(5), only=model.adapters))
    assert alone.keys() == model.adapters
    for name, value in alone.items():
        np.testing.assert_array_equal(value, whole[name], name)


def test_dims_are_those_of_the_matmul_and_the_rank() -> None:
    model = DecoderModel(with_lora(SMALL, rank=2))
    names = model.dim_names()["decoder"]["attention"]
    assert names["query"]["lora_a"] == ("layers", "embed", "lora_rank")
    assert names["query"]["lora_b"] == ("layers", "lora_rank", "heads", "head_dim")
    assert names["output"]["lora_a"] == ("layers", "heads", "head_dim", "lora_rank")
    assert names["output"]["lora_b"] == ("layers", "lora_rank", "embed")
    shapes = model.abstract()["decoder"]["attention"]["key"]
    assert shapes["lora_a"].shape == (2, 32, 2)
    assert shapes["lora_b"].shape == (2, 2, 2, 8)
    mesh = Mesh(("fsdp", "tp"), devices=range(4), shape=(2, 2))
    layout = model.layouts(mesh)["decoder"]["mlp"]["down"]
    assert tuple(layout["lora_a"]) == (None, "tp")
    assert tuple(layout["lora_b"]) == (None, None, "fsdp")


@pytest.mark.parametrize("config", [SMALL, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("targets", [None, ("q_proj",), ("o_proj", "k_proj")])
def test_targets_choose_the_matmuls(config: DecoderConfig, targets: Any) -> None:
    adapted = with_lora(config, rank=2, targets=targets)
    model = DecoderModel(adapted)
    assert model.adapters == names_of(adapted) - names_of(config)
    assert len(model.adapters) == 2 * len(adapted.lora_targets)
    leaves = named_leaves(model.abstract())
    added = sum(math.prod(leaves[name].shape) for name in model.adapters)
    layer, plain = (one.layer_costs[0][0] for one in (adapted, config))
    assert round(1e6 * (layer - plain)) * adapted.num_layers == added


def test_the_scale_is_alpha_over_rank_and_one_by_default() -> None:
    assert LoraConfig(rank=8, alpha=16.0).scale == 2.0
    assert LoraConfig(rank=8).scale == 1.0


@pytest.mark.parametrize(
    ("config", "lora", "got"),
    [
        (SMALL, {"rank": -1}, "lora.rank = -1 is not a number from 0 up"),
        (SMALL, {"rank": 2, "alpha": 0.0}, "lora.alpha = 0.0 is not a positive number"),
        (SMALL, {"rank": 2, "alpha": math.nan}, "lora.alpha = nan"),
        (SMALL, {"rank": 2, "targets": ()}, "lora.targets = ()"),
        (SMALL, {"rank": 2, "targets": ("query",)}, "lora.targets has 'query'"),
        (SMALL, {"rank": 2, "targets": ("embed_tokens",)}, "has 'embed_tokens'"),
        (EXPERTS, {"rank": 2, "targets": ("up_proj",)}, "experts have no adapters"),
        # Two heads of eight: k_proj is a matrix of 32 x 16.
        (SMALL, {"rank": 17}, "lora.rank = 17 is more than the rank of k_proj"),
    ],
)
def test_adapters_that_cannot_be_are_refused(config: Any, lora: Any, got: str) -> None:
    with pytest.raises(ModelShapeError) as caught:
        with_lora(config, **lora)
    assert got in str(caught.value)


def test_a_rank_up_to_the_smaller_dim_is_taken() -> None:
    assert with_lora(SMALL, rank=16).lora.rank == 16
    assert with_lora(SMALL, rank=32, targets=["q_proj"]).lora_targets == ("q_proj",)


def test_only_adapters_are_trained_unless_patterns_say_so() -> None:
    model = DecoderModel(with_lora(SMALL, rank=2))
    names = names_of(model.config)
    assert freeze(model, None, ()).frozen == names - model.adapters
    both = freeze(model, ["*lora_?", "*norm*"], ())
    assert names - both.frozen == model.adapters | {n for n in names if "norm" in n}
    without_a = freeze(model, None, ["*lora_a"])
    assert names - without_a.frozen == {n for n in names if n.endswith("lora_b")}


@pytest.mark.parametrize("patterns", [(["*norm*"], []), (None, ["*lora*"])])
def test_adapters_that_nothing_would_train_are_refused(patterns: Any) -> None:
    with pytest.raises(SettingValueError, match="no adapter is left to train"):
        freeze(DecoderModel(with_lora(SMALL, rank=2)), *patterns)


def test_freezing_what_is_not_trained_is_refused() -> None:
    with pytest.raises(SettingValueError, match="'embedding'"):
        freeze(DecoderModel(with_lora(SMALL, rank=2)), None, ["embedding"])


@pytest.mark.full
def test_the_merged_reference_can_differ() -> None:
    """A negative control: another alpha is seen."""
    model = DecoderModel(with_lora(SMALL, rank=3, alpha=5.0))
    params, tokens = random_params(model), jnp.ones((1, 4), jnp.int32)
    other = DecoderModel(with_lora(SMALL, rank=3, alpha=5.1))
    first, second = (jax.jit(m.apply)(params, tokens) for m in (model, other))
    assert np.abs(first - second).max() > 1e-3 * np.abs(first).max()
