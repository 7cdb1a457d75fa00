# SPDX-License-Identifier: Apache-2.0
"""What the decoders of Llama, Mistral and Qwen have in common.

They normalize before attention and MLP only, by the scale itself, and gate with silu.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from tessera.errors import ModelFolderError
from tessera.train.models.decoder.config import DecoderConfig
from tessera.train.models.families.config_keys import (
    REQUIRED,
    ConfigKeys,
    read_rope,
    read_rope_kind,
)
from tessera.train.models.families.family import Tensor

LAYER: Final = "model.layers.{layer}."

FEATURES: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "norm_unit_offset": False,
        "post_norms": False,
        "activation": "silu",
        "scale_embedding": False,
    }
)

NO_DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType({})

_ACTIVATIONS: Final = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}

# Transformers' names of the kinds of layers.
_KINDS: Final = {"sliding_attention": "local", "full_attention": "global"}

# Transformers' names of rope_low_rotations and rope_high_rotations.
_ROTATION_KEYS: Final = {
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": ("beta_slow", "beta_fast"),
}

# The matmuls of a layer: parameter, tensor, and how many dims are contracted.
_PROJECTIONS: Final = (
    ("attention.query", "self_attn.q_proj", 1),
    ("attention.key", "self_attn.k_proj", 1),
    ("attention.value", "self_attn.v_proj", 1),
    ("attention.output", "self_attn.o_proj", 2),
    ("mlp.gate", "mlp.gate_proj", 1),
    ("mlp.up", "mlp.up_proj", 1),
    ("mlp.down", "mlp.down_proj", 1),
)


def tensor_table(norms: Mapping[str, str]) -> tuple[Tensor, ...]:
    """The rows of a family whose layers have these norms besides those of attention."""
    norms = {
        "pre_attention_norm": "input_layernorm",
        "attention.query_norm": "self_attn.q_norm",
        "attention.key_norm": "self_attn.k_norm",
        **norms,
    }
    rows = [
        Tensor("embedding", "model.embed_tokens.weight"),
        Tensor("head", "lm_head.weight"),
        Tensor("final_norm.scale", "model.norm.weight"),
    ]
    for path, name in norms.items():
        rows.append(Tensor(f"decoder.{path}.scale", f"{LAYER}{name}.weight"))
    for path, name, inputs in _PROJECTIONS:
        rows.append(Tensor(f"decoder.{path}.kernel", f"{LAYER}{name}.weight", inputs))
        rows.append(Tensor(f"decoder.{path}.bias", f"{LAYER}{name}.bias", 0))
    return tuple(rows)


TABLE: Final = tensor_table({"pre_mlp_norm": "post_attention_layernorm"})


def read_sizes(
    keys: ConfigKeys,
    *,
    features: Mapping[str, Any] = FEATURES,
    defaults: Mapping[str, Any] = NO_DEFAULTS,
) -> dict[str, Any]:
    """The fields of sizes, heads and norms.

    Args:
      keys: The configuration.
      features: Fields that no key decides.
      defaults: Values of keys that may be left out.
    """

    def take(name: str, kind: type[Any]) -> Any:
        return keys.take(name, kind, defaults.get(name, REQUIRED))

    keys.expect("attention_dropout", 0.0, None)
    keys.expect("mlp_bias", False)
    keys.expect("pretraining_tp", 1)
    width, heads = take("hidden_size", int), take("num_attention_heads", int)
    bias = keys.take("attention_bias", bool, defaults.get("attention_bias", False))
    kv_heads = defaults.get("num_key_value_heads", heads)
    epsilon = defaults.get("rms_norm_eps", 1e-6)
    kv_heads = keys.take_nullable("num_key_value_heads", int, kv_heads)
    head_dim = defaults.get("head_dim", width // max(heads, 1))
    return {
        **features,
        "vocab_size": take("vocab_size", int),
        "d_model": width,
        "num_layers": take("num_hidden_layers", int),
        "num_heads": heads,
        "num_kv_heads": heads if kv_heads is None else kv_heads,
        "head_dim": keys.take("head_dim", int, head_dim),
        "mlp_dim": take("intermediate_size", int),
        "norm_epsilon": keys.take("rms_norm_eps", float, epsilon),
        "qkv_bias": bias,
        "output_bias": bias,
        "tied_head": keys.take(
            "tie_word_embeddings", bool, defaults.get("tie_word_embeddings", False)
        ),
    }


def read_rotation(keys: ConfigKeys, base: float = 10_000.0) -> dict[str, Any]:
    """The rotary fields of a family whose layers all rotate alike."""
    rope = read_rope(keys)
    theta = rope.take("rope_theta", float, base)
    scaling = read_scaling(keys, rope)
    scale = scaling.pop("factor", 1.0)
    return {
        "rope_base_local": theta,
        "rope_base_global": theta,
        "rope_scale_local": scale,
        "rope_scale_global": scale,
        **scaling,
    }


def read_dense(
    keys: ConfigKeys, defaults: Mapping[str, Any] = NO_DEFAULTS
) -> dict[str, Any]:
    """The fields of a Llama, a Mistral or a Qwen, but for windows and experts."""
    keys.expect("hidden_act", "silu")
    return read_sizes(keys, defaults=defaults) | read_rotation(keys)


def read_layer_types(keys: ConfigKeys, num_layers: int) -> dict[str, Any]:
    """The fields that say which layers have a window; none if the key is absent."""
    types = keys.take("layer_types", list, [])
    if not types:
        return {}
    if len(types) != num_layers or any(kind not in [*_KINDS] for kind in types):
        keys.refuse("layer_types", f"not {num_layers} of {' and '.join(_KINDS)}")
        return {"global_every": 1}
    kinds = tuple(_KINDS[kind] for kind in types)
    every = kinds.index("global") + 1 if "global" in kinds else num_layers + 1
    regular = tuple(
        "local" if i % every else "global" for i in range(1, num_layers + 1)
    )
    if kinds != regular:
        return {"layer_types": kinds}
    # A distance is valid for another number of layers, too.
    return {"global_every": every if "global" in kinds else None}


def write_layer_types(config: DecoderConfig) -> list[str]:
    """The value of the key ``layer_types``."""
    names = {kind: name for name, kind in _KINDS.items()}
    return [names[kind] for kind in config.layer_kinds]


def check_width(config: DecoderConfig) -> None:
    """Check what Transformers checks of Llama and Gemma, but not of other families.

    Raises:
      ModelFolderError: [T806] d_model is no multiple of the number of heads.
    """
    if config.d_model % config.num_heads:
        raise ModelFolderError(
            "Transformers loads no model of this family and these sizes",
            got=f"d_model = {config.d_model} is no multiple of num_heads = "
            f"{config.num_heads}",
            fix="export it without --format=hf",
        )


def read_scaling(keys: ConfigKeys, rope: ConfigKeys) -> dict[str, Any]:
    """The fields about rotary scaling; transformers' modeling_rope_utils defines it."""
    kind = read_rope_kind(rope, "linear", "llama3", "yarn")
    if kind == "default":
        return {}
    fields: dict[str, Any] = {"factor": rope.take("factor", float)}
    if kind == "linear":
        return fields
    fields["rope_kind"] = kind
    length = keys.values.get("max_position_embeddings")
    original = rope.take("original_max_position_embeddings", int, length)
    if original is None:
        rope.refuse("original_max_position_embeddings", f"{kind} needs it")
    fields["rope_original_length"] = original
    if kind == "llama3":
        fields["rope_low_rotations"] = rope.take("low_freq_factor", float)
        fields["rope_high_rotations"] = rope.take("high_freq_factor", float)
    elif kind == "yarn":
        fields["rope_low_rotations"] = rope.take("beta_slow", float, 1.0)
        fields["rope_high_rotations"] = rope.take("beta_fast", float, 32.0)
        fields["rope_truncate"] = rope.take("truncate", bool, True)
        fields["rope_attention_factor"] = _attention_factor(rope, fields["factor"])
    if fields["rope_low_rotations"] >= fields["rope_high_rotations"]:
        low, high = _ROTATION_KEYS[kind]
        rope.refuse(low, f"not below {high} = {fields['rope_high_rotations']}")
    if fields["factor"] == 1 and fields.get("rope_attention_factor") in (None, 1):
        return {}  # it scales nothing
    return fields


def _attention_factor(rope: ConfigKeys, scale: float) -> float | None:
    """The factor of yarn's queries and keys; None is that of the scale alone."""
    names = "attention_factor", "mscale", "mscale_all_dim"
    factor, first, second = (rope.take(name, float, None) for name in names)
    if factor is not None or not (first and second):
        return factor
    growth = 0.1 * math.log(scale) if scale > 1 else 0.0
    return (growth * first + 1) / (growth * second + 1)


def write_sizes(config: DecoderConfig) -> dict[str, Any]:
    """The keys of sizes and rotations, in both spellings of the rotary ones.

    Layers of different rotations do not read back as they were.
    """
    rope: dict[str, Any] = {"rope_type": "default"}
    theta, scale = config.rope_base_global, config.rope_scale_global
    if "global" not in config.layer_kinds:
        theta, scale = config.rope_base_local, config.rope_scale_local
    if scale != 1:
        rope = {"rope_type": config.rope_kind, "factor": scale}
    if config.rope_kind in _ROTATION_KEYS:
        low, high = _ROTATION_KEYS[config.rope_kind]
        if config.rope_kind == "yarn":
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
        "hidden_act": _ACTIVATIONS.get(config.activation, config.activation),
        "attention_bias": config.qkv_bias,
        "tie_word_embeddings": config.tied_head,
        "rope_theta": theta,
        "rope_scaling": rope if "factor" in rope else None,
        "rope_parameters": {**rope, "rope_theta": theta},
    }
