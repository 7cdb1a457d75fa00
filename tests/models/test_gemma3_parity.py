# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's Gemma 3 on the same weights gives the same logits."""

import dataclasses
import json
import math
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tessera.models import DecoderConfig, DecoderModel

GOLDEN = json.loads(
    (Path(__file__).parent / "golden" / "gemma3_golden.json").read_text()
)
SIZES = GOLDEN["config"]
CONFIG = DecoderConfig(
    vocab_size=SIZES["vocab_size"],
    d_model=SIZES["hidden_size"],
    num_layers=SIZES["num_hidden_layers"],
    num_heads=SIZES["num_attention_heads"],
    num_kv_heads=SIZES["num_key_value_heads"],
    head_dim=SIZES["head_dim"],
    mlp_dim=SIZES["intermediate_size"],
    window=SIZES["sliding_window"],
    query_pre_attn_scalar=SIZES["query_pre_attn_scalar"],
    rope_base_local=GOLDEN["rope"]["local"]["rope_theta"],
    rope_base_global=GOLDEN["rope"]["global"]["rope_theta"],
    rope_scale_global=GOLDEN["rope"]["global"]["factor"],
)

# Where a layer's weight is found there, and the shape it has here. Theirs are stored
# [out, in], with the heads and head_dim merged.
LAYER = {
    "pre_attention_norm/scale": ("input_layernorm", ()),
    "post_attention_norm/scale": ("post_attention_layernorm", ()),
    "pre_mlp_norm/scale": ("pre_feedforward_layernorm", ()),
    "post_mlp_norm/scale": ("post_feedforward_layernorm", ()),
    "attention/query_norm/scale": ("self_attn.q_norm", ()),
    "attention/key_norm/scale": ("self_attn.k_norm", ()),
    "attention/query/kernel": ("self_attn.q_proj", (-1, CONFIG.num_heads, 8)),
    "attention/key/kernel": ("self_attn.k_proj", (-1, CONFIG.num_kv_heads, 8)),
    "attention/value/kernel": ("self_attn.v_proj", (-1, CONFIG.num_kv_heads, 8)),
    "attention/output/kernel": ("self_attn.o_proj", (CONFIG.num_heads, 8, -1)),
    "mlp/gate/kernel": ("mlp.gate_proj", (CONFIG.d_model, -1)),
    "mlp/up/kernel": ("mlp.up_proj", (CONFIG.d_model, -1)),
    "mlp/down/kernel": ("mlp.down_proj", (CONFIG.mlp_dim, -1)),
}


def weight(name: str) -> np.ndarray:
    """The formula of golden/make_gemma3_golden.py."""
    shape, mask = GOLDEN["parameters"][name], np.uint64(0xFFFFFFFF)
    h = np.arange(math.prod(shape), dtype=np.uint64) * np.uint64(2654435761)
    h = (h + np.uint64(zlib.crc32(name.encode()))) & mask
    h ^= h >> np.uint64(15)
    h = (h * np.uint64(2246822519)) & mask
    h ^= h >> np.uint64(13)
    scale = 0.6 if len(shape) == 1 else math.sqrt(12 / shape[1])
    return (scale * (h / 2**32 - 0.5)).reshape(shape).astype(np.float32)


def their_weights() -> dict[str, Any]:
    params: dict[str, Any] = {
        "embedding": weight("model.embed_tokens.weight"),
        "final_norm": {"scale": weight("model.norm.weight")},
        "decoder": {},
    }
    for path, (theirs, shape) in LAYER.items():
        layers = [
            weight(f"model.layers.{i}.{theirs}.weight")
            for i in range(CONFIG.num_layers)
        ]
        if shape:
            layers = [layer.T.reshape(shape) for layer in layers]
        *folders, leaf = path.split("/")
        node = params["decoder"]
        for folder in folders:
            node = node.setdefault(folder, {})
        node[leaf] = np.stack(layers)
    return params


def logits_of(config: DecoderConfig) -> np.ndarray:
    tokens = jnp.asarray(GOLDEN["tokens"], jnp.int32)
    # Half the time to compile, the same arithmetic.
    quick = {"xla_backend_optimization_level": 0}
    apply = jax.jit(DecoderModel(config).apply, compiler_options=quick)
    return np.asarray(apply(their_weights(), tokens))


def test_local_and_global_layers_alternate_as_theirs() -> None:
    kinds = [
        "full_attention" if CONFIG.is_global(i) else "sliding_attention"
        for i in range(7)
    ]
    assert kinds == GOLDEN["layer_types"]


def test_every_weight_of_theirs_has_a_place() -> None:
    used = 2 + CONFIG.num_layers * len(LAYER)
    assert used == len(GOLDEN["parameters"])
    assert CONFIG.num_params == sum(map(math.prod, GOLDEN["parameters"].values()))


def test_logits_are_theirs() -> None:
    np.testing.assert_allclose(
        logits_of(CONFIG), GOLDEN["logits"], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    "change",
    [
        {"window": 6},
        {"rope_scale_global": 1.0},
        pytest.param({"global_every": 5}, marks=pytest.mark.full),
        pytest.param({"rope_base_global": 10_000.0}, marks=pytest.mark.full),
        pytest.param({"rope_base_local": 1_000_000.0}, marks=pytest.mark.full),
        pytest.param({"query_pre_attn_scalar": 8}, marks=pytest.mark.full),
        pytest.param({"norm_epsilon": 1e-2}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_the_comparison_notices_a_wrong_constant(change: dict[str, Any]) -> None:
    wrong = logits_of(dataclasses.replace(CONFIG, **change))
    assert np.abs(wrong - np.array(GOLDEN["logits"])).max() > 1e-3
