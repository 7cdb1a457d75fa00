# SPDX-License-Identifier: Apache-2.0
"""GPT-OSS, whose layers have attention sinks and experts with biases.

Its published folders have quantized experts (MXFP4), which are refused; those in
bfloat16, as Transformers writes them, are read.

Source: gpt-oss-120b and gpt-oss-20b Model Card, arXiv 2508.10925.
"""

from typing import Any, Final

from tessera.train.models.decoder.config import DecoderConfig
from tessera.train.models.families.config_keys import ConfigKeys
from tessera.train.models.families.dense import (
    LAYER,
    TABLE,
    read_layer_types,
    read_rotation,
    read_sizes,
    write_layer_types,
    write_sizes,
)
from tessera.train.models.families.family import Family, Part, Tensor

_DEFAULTS: Final = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
}
# The constants of the gate.
_GATE: Final = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}


def _read(keys: ConfigKeys) -> dict[str, Any]:
    keys.expect("hidden_act", "silu")
    for name, value in _GATE.items():
        keys.expect(name, value)
    if "quantization_config" in keys:
        keys.refuse("quantization_config", "only a folder in bfloat16 can be read")
    if "rope_scaling" not in keys and "rope_parameters" not in keys:
        keys.refuse("rope_parameters", "the kind of rotary scaling has to be there")
    keys.skip("initial_context_length", "router_aux_loss_coef", "output_router_logits")
    chosen = keys.take("num_experts_per_tok", int, 4)
    keys.expect("experts_per_token", chosen)
    sizes = read_sizes(keys, defaults=_DEFAULTS)
    layers = read_layer_types(keys, sizes["num_layers"]) or {"global_every": 2}
    return {
        **sizes,
        **read_rotation(keys, 150_000.0),
        **layers,
        "window": keys.take_nullable("sliding_window", int, 128),
        "qk_norm": False,
        "activation": "clamped_swiglu",
        "attention_sinks": True,
        "num_experts": keys.take("num_local_experts", int, 128),
        "experts_per_token": chosen,
        "expert_biases": True,
    }


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {
        **write_sizes(config),
        **_GATE,
        "hidden_act": "silu",
        "sliding_window": config.window,
        "layer_types": write_layer_types(config),
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
    }


# Gates and what they are for take turns in one tensor.
_EXPERTS: Final[tuple[tuple[str, str, Part | None], ...]] = (
    ("gate", "gate_up_proj", lambda n: slice(0, None, 2)),
    ("up", "gate_up_proj", lambda n: slice(1, None, 2)),
    ("down", "down_proj", None),
)

GPT_OSS: Final = Family(
    name="gpt_oss",
    model_types=("gpt_oss",),
    architecture="GptOssForCausalLM",
    read_config=_read,
    write_config=_write,
    tensors=(
        *TABLE,
        Tensor("decoder.attention.sinks", f"{LAYER}self_attn.sinks"),
        Tensor("decoder.experts.router", f"{LAYER}mlp.router.weight", 1),
        Tensor("decoder.experts.router_bias", f"{LAYER}mlp.router.bias"),
        *(
            Tensor(
                f"decoder.experts.{path}{bias}",
                f"{LAYER}mlp.experts.{name}{bias}",
                part=part,
            )
            for bias in ("", "_bias")
            for path, name, part in _EXPERTS
        ),
    ),
)
