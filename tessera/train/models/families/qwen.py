# SPDX-License-Identifier: Apache-2.0
"""Qwen 3, dense and with experts, and Qwen 2.5.

Sources: Qwen3 Technical Report, arXiv 2505.09388; Qwen2.5, arXiv 2412.15115.
"""

from typing import Any, Final

from tessera.train.models.decoder.config import DecoderConfig
from tessera.train.models.families.config_keys import ConfigKeys
from tessera.train.models.families.dense import (
    LAYER,
    TABLE,
    read_dense,
    read_layer_types,
    write_layer_types,
    write_sizes,
)
from tessera.train.models.families.family import Family, Tensor

# More than any model has, which DecoderConfig refuses.
_MOST_LAYERS: Final = 2**16


def _read_qwen2(keys: ConfigKeys) -> dict[str, Any]:
    # Biases of queries, keys and values, whatever this key says.
    keys.expect("attention_bias", True)
    keys.expect("use_mrope", False)
    sizes = _with_windows(keys, read_dense(keys, {"num_key_value_heads": 32}))
    return sizes | {"qk_norm": False, "qkv_bias": True, "output_bias": False}


def _read(keys: ConfigKeys) -> dict[str, Any]:
    sizes = read_dense(keys, {"head_dim": 128, "num_key_value_heads": 32})
    return _with_windows(keys, sizes)


def _with_windows(keys: ConfigKeys, sizes: dict[str, Any]) -> dict[str, Any]:
    count = sizes["num_layers"]
    window = keys.take_nullable("sliding_window", int, 4096)
    first = keys.take("max_window_layers", int, 28)
    layers = read_layer_types(keys, count)
    if not keys.take("use_sliding_window", bool, False):
        if layers and layers != {"global_every": 1}:
            keys.refuse("layer_types", "windows, but use_sliding_window is false")
        window = None
        layers.clear()
    elif not layers and window is not None and first < count <= _MOST_LAYERS:
        kinds = ("global",) * first + ("local",) * (count - first)
        layers = {"layer_types": kinds} if first > 0 else {"global_every": None}
    return sizes | (layers or {"global_every": 1}) | {"window": window}


def _read_experts(keys: ConfigKeys) -> dict[str, Any]:
    # Versions of Transformers differ in which layers then have a window.
    keys.expect("use_sliding_window", False)
    keys.skip("sliding_window", "max_window_layers")
    types = keys.take("layer_types", list, [])
    keys.expect("layer_types", None, ["full_attention"] * len(types))
    keys.expect("decoder_sparse_step", 1)
    keys.expect("mlp_only_layers", [])
    keys.skip("router_aux_loss_coef", "output_router_logits")
    sizes = read_dense(keys, {"num_key_value_heads": 4})
    return sizes | {
        "mlp_dim": keys.take("moe_intermediate_size", int, 768),
        "global_every": 1,
        "num_experts": keys.take("num_experts", int, 128),
        "experts_per_token": keys.take("num_experts_per_tok", int, 8),
        "renormalize_experts": keys.take("norm_topk_prob", bool, False),
    }


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {
        **write_sizes(config),
        "use_sliding_window": "local" in config.layer_kinds,
        "sliding_window": config.window,
        "layer_types": write_layer_types(config),
    }


def _write_qwen2(config: DecoderConfig) -> dict[str, Any]:
    values = _write(config)
    del values["attention_bias"]
    return values


def _write_experts(config: DecoderConfig) -> dict[str, Any]:
    return {
        **write_sizes(config),
        "use_sliding_window": False,
        "moe_intermediate_size": config.mlp_dim,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "norm_topk_prob": config.renormalize_experts,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


QWEN3: Final = Family(
    name="qwen3",
    model_types=("qwen3",),
    architecture="Qwen3ForCausalLM",
    read_config=_read,
    write_config=_write,
    tensors=TABLE,
)

QWEN2: Final = Family(
    name="qwen2",
    model_types=("qwen2",),
    architecture="Qwen2ForCausalLM",
    read_config=_read_qwen2,
    write_config=_write_qwen2,
    tensors=TABLE,
)

QWEN3_MOE: Final = Family(
    name="qwen3_moe",
    model_types=("qwen3_moe",),
    architecture="Qwen3MoeForCausalLM",
    read_config=_read_experts,
    write_config=_write_experts,
    tensors=(
        *TABLE,
        Tensor("decoder.experts.router", f"{LAYER}mlp.gate.weight", 1),
        *(
            Tensor(
                f"decoder.experts.{part}",
                LAYER + "mlp.experts.{expert}." + f"{part}_proj.weight",
                1,
            )
            for part in ("gate", "up", "down")
        ),
    ),
)
