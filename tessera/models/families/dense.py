# SPDX-License-Identifier: Apache-2.0
"""What the decoders of Llama, Mistral and Qwen have in common.

They normalize before attention and MLP only, by the scale itself, and gate with silu.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from tessera.models.decoder.config import DecoderConfig
from tessera.models.families.config_keys import ConfigKeys, read_rope
from tessera.models.families.family import Tensor

LAYER: Final = "model.layers.{layer}."

FEATURES: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "norm_unit_offset": False,
        "post_norms": False,
        "activation": "silu",
        "scale_embedding": False,
    }
)

# The matmuls of a layer: parameter, tensor, and how many dims are contracted.
PROJECTIONS: Final = (
    ("attention.query", "self_attn.q_proj", 1),
    ("attention.key", "self_attn.k_proj", 1),
    ("attention.value", "self_attn.v_proj", 1),
    ("attention.output", "self_attn.o_proj", 2),
    ("mlp.gate", "mlp.gate_proj", 1),
    ("mlp.up", "mlp.up_proj", 1),
    ("mlp.down", "mlp.down_proj", 1),
)

TABLE: Final = (
    Tensor("embedding", "model.embed_tokens.weight"),
    Tensor("head", "lm_head.weight"),
    Tensor("final_norm.scale", "model.norm.weight"),
    Tensor("decoder.pre_attention_norm.scale", f"{LAYER}input_layernorm.weight"),
    Tensor("decoder.pre_mlp_norm.scale", f"{LAYER}post_attention_layernorm.weight"),
    Tensor("decoder.attention.query_norm.scale", f"{LAYER}self_attn.q_norm.weight"),
    Tensor("decoder.attention.key_norm.scale", f"{LAYER}self_attn.k_norm.weight"),
    *(
        Tensor(f"decoder.{path}.{part}", f"{LAYER}{name}.{suffix}", inputs)
        for path, name, num_inputs in PROJECTIONS
        for part, suffix, inputs in (
            ("kernel", "weight", num_inputs),
            ("bias", "bias", 0),
        )
    ),
)
TIED: Final = MappingProxyType({"lm_head.weight": "model.embed_tokens.weight"})


def read_sizes(keys: ConfigKeys, *, head_dim: int | None = None) -> dict[str, Any]:
    """The fields of ``DecoderConfig`` that all of these families have.

    Args:
      keys: The configuration.
      head_dim: The default; None is d_model / num_heads.
    """
    keys.expect("hidden_act", "silu")
    keys.expect("attention_dropout", 0.0, None)
    keys.expect("mlp_bias", False)
    keys.expect("pretraining_tp", 1)
    width = keys.take("hidden_size", int)
    heads = keys.take("num_attention_heads", int)
    bias = keys.take("attention_bias", bool, False)
    rope = read_rope(keys)
    return {
        **FEATURES,
        "vocab_size": keys.take("vocab_size", int),
        "d_model": width,
        "num_layers": keys.take("num_hidden_layers", int),
        "num_heads": heads,
        "num_kv_heads": keys.take("num_key_value_heads", int, heads),
        "head_dim": keys.take("head_dim", int, head_dim or width // max(heads, 1)),
        "mlp_dim": keys.take("intermediate_size", int),
        "norm_epsilon": keys.take("rms_norm_eps", float, 1e-6),
        "qkv_bias": bias,
        "output_bias": bias,
        "tied_head": keys.take("tie_word_embeddings", bool, False),
        "global_every": 1,
        "rope_base_global": rope.take("rope_theta", float, 10_000.0),
        **_read_scaling(keys, rope),
    }


def _read_scaling(keys: ConfigKeys, rope: ConfigKeys) -> dict[str, Any]:
    """The fields about rotary scaling; transformers' modeling_rope_utils defines it."""
    kind = rope.take("rope_type", str, "default")
    if kind == "default":
        return {}
    rope.expect("rope_type", "linear", "llama3", "yarn")
    fields: dict[str, Any] = {"rope_scale_global": rope.take("factor", float)}
    if kind == "linear":
        return fields
    fields["rope_kind"] = kind if kind in ("llama3", "yarn") else "linear"
    length = keys.values.get("max_position_embeddings")
    fields["rope_original_length"] = rope.take(
        "original_max_position_embeddings", int, length
    )
    if kind == "llama3":
        fields["rope_low_rotations"] = rope.take("low_freq_factor", float)
        fields["rope_high_rotations"] = rope.take("high_freq_factor", float)
    elif kind == "yarn":
        rope.expect("mscale", None)
        rope.expect("mscale_all_dim", None)
        fields["rope_low_rotations"] = rope.take("beta_slow", float, 1.0)
        fields["rope_high_rotations"] = rope.take("beta_fast", float, 32.0)
        fields["rope_truncate"] = rope.take("truncate", bool, True)
        fields["rope_attention_factor"] = rope.take("attention_factor", float, None)
    return fields


def write_sizes(config: DecoderConfig) -> dict[str, Any]:
    """The keys that ``read_sizes`` reads, in both spellings of the rotary ones."""
    rope: dict[str, Any] = {"rope_type": "default"}
    if config.rope_scale_global != 1:
        rope = {"rope_type": config.rope_kind, "factor": config.rope_scale_global}
    if config.rope_kind != "linear":
        low, high = "low_freq_factor", "high_freq_factor"
        if config.rope_kind == "yarn":
            low, high = "beta_slow", "beta_fast"
            rope["truncate"] = config.rope_truncate
            if config.rope_attention_factor is not None:
                rope["attention_factor"] = config.rope_attention_factor
        rope |= {
            "original_max_position_embeddings": config.rope_original_length,
            low: config.rope_low_rotations,
            high: config.rope_high_rotations,
        }
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp_dim,
        "rms_norm_eps": config.norm_epsilon,
        "hidden_act": "silu",
        "attention_bias": config.qkv_bias,
        "tie_word_embeddings": config.tied_head,
        "rope_theta": config.rope_base_global,
        "rope_scaling": rope if "factor" in rope else None,
        "rope_parameters": {**rope, "rope_theta": config.rope_base_global},
    }
