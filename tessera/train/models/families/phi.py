# SPDX-License-Identifier: Apache-2.0
"""Phi 3 and Phi 4, whose folders have one tensor for several matmuls.

The models with longrope or a partial rotation (Phi 4 mini) are refused.

Source: Phi-4 Technical Report, arXiv 2412.08905.
"""

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
    for dropout in ("resid_pdrop", "embd_pdrop"):
        keys.expect(dropout, 0.0)
    keys.expect("partial_rotary_factor", 1.0, None)
    # Of longrope; and of the programs before Transformers had this family.
    keys.skip("original_max_position_embeddings", "auto_map")
    rope = read_rope(keys)
    read_rope_kind(rope)
    rope.expect("partial_rotary_factor", 1.0)
    theta = rope.take("rope_theta", float, 10_000.0)
    window = keys.take_nullable("sliding_window", int, None)
    return read_sizes(keys, defaults={"rms_norm_eps": 1e-5}) | {
        "rope_base_local": theta,
        "rope_base_global": theta,
        "global_every": 1 if window is None else None,
        "window": window,
        "qk_norm": False,
    }


def _write(config: DecoderConfig) -> dict[str, Any]:
    window = config.window if "local" in config.layer_kinds else None
    return {**write_sizes(config), "sliding_window": window}


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
