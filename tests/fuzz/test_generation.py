# SPDX-License-Identifier: Apache-2.0
"""Random decoders and prompts: completions are those of the whole sequence."""

from dataclasses import fields
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tessera.train.models import DecoderConfig, DecoderModel
from tessera.train.models.decoder.config import LoraConfig
from tessera.train.rollouts import Sampler

# Fields that are drawn; the others change nothing that a cache could get wrong.
DRAWN = {
    *("vocab_size", "d_model", "num_layers", "num_heads", "num_kv_heads"),
    *("head_dim", "mlp_dim", "window", "query_pre_attn_scalar", "global_every"),
    *("rope_base_local", "rope_base_global", "rope_scale_global"),
    *("num_experts", "experts_per_token", "renormalize_experts"),
    *("layer_types", "rope_scale_local", "rope_kind", "rope_original_length"),
    *("norm_unit_offset", "post_norms", "qk_norm", "qkv_bias", "output_bias"),
    *("activation", "scale_embedding", "tied_head", "logit_soft_cap", "lora"),
    *("attention_soft_cap", "pre_norms", "qk_norm_joint", "rope_dims"),
    *("attention_sinks", "expert_biases"),
}
SAME = {
    *("norm_epsilon", "scan_unroll", "router_balance_weight", "router_z_weight"),
    *("rope_low_rotations", "rope_high_rotations", "rope_truncate"),
    *("rope_attention_factor", "rope_short_factors", "rope_long_factors"),
}


def drawn_config(draw: Random) -> DecoderConfig:
    kv_heads = draw.choice([1, 2])
    config: dict[str, Any] = {
        "vocab_size": draw.randint(4, 12),
        "d_model": 8,
        "num_layers": draw.randint(1, 4),
        "num_kv_heads": kv_heads,
        "num_heads": kv_heads * draw.choice([1, 2]),
        "head_dim": draw.choice([2, 4]),
        "mlp_dim": 8,
        "window": draw.randint(1, 9),
        "query_pre_attn_scalar": draw.choice([4, None]),
        "global_every": draw.choice([*range(1, 6), None]),
        "rope_dims": draw.choice([2, None]),
        "rope_base_local": draw.choice([10.0, 100.0]),
        "rope_base_global": draw.choice([50.0, 1000.0]),
        "rope_scale_global": draw.choice([1.0, 8.0]),
    }
    switches = "norm_unit_offset", "post_norms", "qk_norm", "qkv_bias", "output_bias"
    for name in (*switches, "scale_embedding", "tied_head", "attention_sinks"):
        config[name] = draw.random() < 0.5
    config["pre_norms"] = not config["post_norms"] or draw.random() < 0.5
    config["qk_norm_joint"] = config["qk_norm"] and draw.random() < 0.5
    config["activation"] = draw.choice(["gelu_tanh", "silu", "clamped_swiglu"])
    config["logit_soft_cap"] = draw.choice([None, 2.0])
    config["attention_soft_cap"] = draw.choice([None, 1.0])
    if draw.random() < 0.2:
        config |= {"global_every": 1, "window": None}
    elif draw.random() < 0.3:
        del config["global_every"]
        kinds = (draw.choice(["local", "global"]) for _ in range(config["num_layers"]))
        config["layer_types"] = tuple(kinds)
    if draw.random() < 0.5:
        config |= {"rope_kind": draw.choice(["llama3", "yarn"])}
        config |= {"rope_original_length": 8, "rope_scale_local": 4.0}
    if draw.random() < 0.3:
        config |= {"renormalize_experts": draw.random() < 0.5}
        config |= {"expert_biases": draw.random() < 0.5}
        config |= {"num_experts": 3, "experts_per_token": draw.randint(1, 3)}
    if draw.random() < 0.3:
        # No projection of these sizes is narrower than two.
        targets = draw.choice([None, ("k_proj",), ("q_proj", "o_proj")])
        config["lora"] = LoraConfig(
            draw.randint(1, 2), draw.choice([3.0, None]), targets
        )
    return DecoderConfig(**config)


def test_every_field_is_drawn_or_cannot_matter() -> None:
    assert {field.name for field in fields(DecoderConfig)} == DRAWN | SAME


@pytest.mark.slow(reason="the one test of the cache with drawn models")
@pytest.mark.fuzz(sample=5, whole=500)
def test_completions_are_those_of_the_whole_sequence(seed: int) -> None:
    draw = Random(seed)
    config = drawn_config(draw)
    model = DecoderModel(config)
    values = np.random.default_rng(seed)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(values.normal(size=leaf.shape), jnp.float32),
        model.abstract(),
    )
    longest, new = draw.randint(1, 12), draw.randint(1, 12)
    distinct = [
        values.integers(0, config.vocab_size, draw.randint(1, longest)).tolist()
        for _ in range(draw.randint(1, 3))
    ]
    prompts = [draw.choice(distinct) for _ in range(draw.randint(1, 6))]
    temperature = draw.choice([0.0, 0.7, 1.0])
    sampler = Sampler(
        model,
        num_tokens=new,
        max_length=longest + new + draw.randint(0, 4),
        slots=draw.randint(1, 4),
        temperature=temperature,
        stop_tokens=[values.integers(0, config.vocab_size)]
        if draw.random() < 0.5
        else [],
        cache_tokens=draw.choice([None, 1, 30]),  # rows wait again with few
        block=draw.choice([1, 2, 4]),
        dispatch_tokens=draw.randint(1, 6),
    )
    made = sampler.complete(params, prompts, jax.random.key(seed))
    # The same model without a limit on its experts.
    reference = jax.jit(model.apply)
    for prompt, each in zip(prompts, made, strict=True):
        assert each.ended == (each.tokens[-1] in sampler.stop_tokens)
        assert each.ended or len(each.tokens) == new
        assert not {*each.tokens[:-1]} & {*sampler.stop_tokens}
        row = np.zeros((1, 24), np.int32)
        row[0, : len(prompt) + len(each.tokens)] = [*prompt, *each.tokens]
        logits = reference(params, row)[0, len(prompt) - 1 :] / (temperature or 1.0)
        expected = np.asarray(jax.nn.log_softmax(logits))[: len(each.tokens)]
        own = expected[np.arange(len(each.tokens)), each.tokens]
        np.testing.assert_allclose(each.log_probs, own, rtol=2e-4, atol=5e-4)
        if temperature == 0:
            np.testing.assert_allclose(own, expected.max(axis=-1), atol=5e-4)
