# SPDX-License-Identifier: Apache-2.0
"""Gemma 3, the text model, and Gemma 2.

Sources: Gemma 3 Technical Report, arXiv 2503.19786; Gemma 2, arXiv 2408.00118.
"""

from typing import Any, Final

from tessera.train.models.decoder.config import DecoderConfig
from tessera.train.models.families.config_keys import (
    ConfigKeys,
    read_rope,
    read_rope_kind,
)
from tessera.train.models.families.dense import (
    check_width,
    read_layer_types,
    read_rotation,
    read_sizes,
    tensor_table,
    write_layer_types,
    write_sizes,
)
from tessera.train.models.families.family import Family

# What files leave out has the values of Gemma2Config and Gemma3TextConfig.
_DEFAULTS: Final = {
    "vocab_size": 256_000,
    "hidden_size": 2304,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 9216,
    "tie_word_embeddings": True,
}


def _read(keys: ConfigKeys, every: int, **defaults: Any) -> dict[str, Any]:
    """The fields that both have, but the rotary ones; a layer in ``every`` is global.

    Other features are the defaults of DecoderConfig.
    """
    keys.expect("hidden_activation", "gelu_pytorch_tanh")
    keys.skip("hidden_act")
    keys.expect("use_bidirectional_attention", False, None)
    if keys.values.get("sliding_window", 0) is None:
        keys.refuse("sliding_window", "local layers need a window")
    sizes = read_sizes(keys, features={}, defaults=_DEFAULTS | defaults)
    layers = read_layer_types(keys, sizes["num_layers"]) or {"global_every": every}
    return sizes | {
        "window": keys.take("sliding_window", int, 4096),
        "query_pre_attn_scalar": keys.take("query_pre_attn_scalar", float, 256.0),
        **layers,
    }


def _read_gemma2(keys: ConfigKeys) -> dict[str, Any]:
    caps = ("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0)
    scores, logits = (keys.take_nullable(name, float, cap) for name, cap in caps)
    return {
        **_read(keys, 2),
        **read_rotation(keys),
        "qk_norm": False,
        "attention_soft_cap": scores,
        "logit_soft_cap": logits,
    }


def _read_gemma3(keys: ConfigKeys) -> dict[str, Any]:
    local = read_rope(keys, "sliding_attention", theta="rope_local_base_freq")
    whole = read_rope(keys, "full_attention")
    read_rope_kind(local)
    is_scaled = read_rope_kind(whole, "linear") == "linear"
    keys.expect("attention_bias", False)
    keys.expect("tie_word_embeddings", True)
    # Transformers ignores this key of a Gemma 3.
    keys.expect("attn_logit_softcapping", None)
    every = keys.take("sliding_window_pattern", int, 6)
    every = keys.take("_sliding_window_pattern", int, every)
    return {
        **_read(keys, every, vocab_size=262_208),
        "rope_base_local": local.take("rope_theta", float, 10_000.0),
        "rope_base_global": whole.take("rope_theta", float, 1_000_000.0),
        "rope_scale_global": whole.take("factor", float) if is_scaled else 1.0,
        "logit_soft_cap": keys.take("final_logit_softcapping", float, None),
    }


def _write_gemma2(config: DecoderConfig) -> dict[str, Any]:
    check_width(config)
    return {
        **write_sizes(config),
        "sliding_window": config.window,
        "layer_types": write_layer_types(config),
        # Transformers refuses a float; a fraction does not read back, so it is refused.
        "query_pre_attn_scalar": int(config.query_pre_attn_scalar or config.head_dim),
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": config.attention_soft_cap,
        "final_logit_softcapping": config.logit_soft_cap,
        "use_bidirectional_attention": False,
    }


def _write_gemma3(config: DecoderConfig) -> dict[str, Any]:
    whole: dict[str, Any] = {"rope_type": "default"}
    if config.rope_scale_global != 1:
        whole = {"rope_type": "linear", "factor": config.rope_scale_global}
    # Both spellings: older versions overlook rope_parameters.
    local = {"rope_type": "default", "rope_theta": config.rope_base_local}
    return _write_gemma2(config) | {
        "rope_theta": config.rope_base_global,
        "rope_local_base_freq": config.rope_base_local,
        "rope_scaling": whole if "factor" in whole else None,
        "rope_parameters": {
            "full_attention": {**whole, "rope_theta": config.rope_base_global},
            "sliding_attention": local,
        },
        "sliding_window_pattern": None if config.layer_types else config.global_every,
    }


_TABLE: Final = tensor_table(
    {
        "post_attention_norm": "post_attention_layernorm",
        "pre_mlp_norm": "pre_feedforward_layernorm",
        "post_mlp_norm": "post_feedforward_layernorm",
    }
)

GEMMA2: Final = Family(
    name="gemma2",
    model_types=("gemma2",),
    architecture="Gemma2ForCausalLM",
    read_config=_read_gemma2,
    write_config=_write_gemma2,
    tensors=_TABLE,
)

GEMMA3: Final = Family(
    name="gemma3",
    model_types=("gemma3_text", "gemma3"),
    architecture="Gemma3ForCausalLM",
    read_config=_read_gemma3,
    write_config=_write_gemma3,
    tensors=_TABLE,
    ignored=(
        *Family.ignored,
        "vision_tower.*",
        "multi_modal_projector.*",
        "model.vision_tower.*",
        "model.multi_modal_projector.*",
    ),
    renamed=(
        ("language_model.", ""),
        ("model.language_model.", "model."),
        *Family.renamed,
    ),
    outer_keys=frozenset({"vision_config", "mm_tokens_per_image"})
    | {"image_token_index", "boi_token_index", "eoi_token_index"}
    | {"image_token_id", "boi_token_id", "eoi_token_id"},
)
