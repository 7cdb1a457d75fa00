# SPDX-License-Identifier: Apache-2.0
"""Phi 3 and Phi 4, whose folders have one tensor for several matmuls.

Source: Phi-4 Technical Report, arXiv 2412.08905.
"""

import math
from typing import Any, Final

from tessera.train.models.decoder.config import DecoderConfig
from tessera.train.models.families.config_keys import (
    ConfigKeys,
    read_rope,
    read_rope_kind,
)
from tessera.train.models.families.dense import LAYER, TABLE, read_sizes, write_sizes
from tessera.train.models.families.family import Family, Part, Tensor


def _read(keys: ConfigKeys) -> dict[str, Any]:
    keys.expect("hidden_act", "silu")
    # Transformers ignores this key of a Phi: it would leave out the biases.
    keys.expect("attention_bias", False)
    for name in ("resid_pdrop", "embd_pdrop", "lm_head_bias"):
        keys.expect(name, 0)
    for name in ("full_attn_mod", "interpolate_factor"):
        keys.expect(name, 1)
    keys.skip("auto_map")  # of programs before Transformers had this family
    rope = read_rope(keys)
    theta = rope.take("rope_theta", float, 10_000.0)
    outer = keys.take("partial_rotary_factor", float, 1.0)
    share = rope.take("partial_rotary_factor", float, outer)
    window = keys.take_nullable("sliding_window", int, None)
    sizes = read_sizes(keys, defaults={"rms_norm_eps": 1e-5})
    return sizes | {
        **_read_longrope(keys, rope),
        "rope_dims": None if share == 1 else int(sizes["head_dim"] * share),
        "rope_base_local": theta,
        "rope_base_global": theta,
        "global_every": 1 if window is None else None,
        "window": window,
        "qk_norm": False,
    }


def _read_longrope(keys: ConfigKeys, rope: ConfigKeys) -> dict[str, Any]:
    outer = keys.take("original_max_position_embeddings", int, 4096)
    if read_rope_kind(rope, "longrope") == "default":
        return {}
    original = rope.take("original_max_position_embeddings", int, outer)
    most = keys.values.get("max_position_embeddings") or original
    scale = rope.take("factor", float, most / original)
    growth = math.log(scale) / math.log(original) if scale > 1 else 0.0
    return {
        "rope_kind": "longrope",
        "rope_original_length": original,
        "rope_attention_factor": rope.take(
            "attention_factor", float, math.sqrt(1 + growth)
        ),
        "rope_short_factors": rope.take("short_factor", list),
        "rope_long_factors": rope.take("long_factor", list),
    }


def _write(config: DecoderConfig) -> dict[str, Any]:
    values, length = write_sizes(config), config.rope_original_length
    rope: dict[str, Any] = values["rope_parameters"]
    rope["partial_rotary_factor"] = config.rotated_dims / config.head_dim
    if config.rope_kind == "longrope":
        values["original_max_position_embeddings"] = length
        rope["rope_type"] = "longrope"
        rope["original_max_position_embeddings"] = length
        rope["attention_factor"] = config.rope_attention_factor or 1.0
        rope["short_factor"] = list(config.rope_short_factors or ())
        rope["long_factor"] = list(config.rope_long_factors or ())
    window = config.window if "local" in config.layer_kinds else None
    return {**values, "sliding_window": window}


def _fused(name: str, *parts: tuple[str, Part]) -> list[Tensor]:
    return [
        Tensor(f"decoder.{path}.kernel", f"{LAYER}{name}.weight", 1, part)
        for path, part in parts
    ]


# Queries may have more heads than keys and values, which are equally many.
_FUSED: Final = (
    *_fused(
        "self_attn.qkv_proj",
        ("attention.query", lambda n: slice(n)),
        ("attention.key", lambda n: slice(-2 * n, -n)),
        ("attention.value", lambda n: slice(-n, None)),
    ),
    *_fused(
        "mlp.gate_up_proj",
        ("mlp.gate", lambda n: slice(n)),
        ("mlp.up", lambda n: slice(n, None)),
    ),
)

PHI3: Final = Family(
    name="phi3",
    model_types=("phi3",),
    architecture="Phi3ForCausalLM",
    read_config=_read,
    write_config=_write,
    tensors=(
        *(row for row in TABLE if row.path not in {one.path for one in _FUSED}),
        *_FUSED,
    ),
)
