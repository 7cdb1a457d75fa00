# SPDX-License-Identifier: Apache-2.0
"""Qwen 3, dense and with experts.

Source: Qwen3 Technical Report, arXiv 2505.09388.
"""

from typing import Any, Final

from tessera.models.decoder.config import DecoderConfig
from tessera.models.families.config_keys import ConfigKeys
from tessera.models.families.dense import LAYER, TABLE, TIED, read_sizes, write_sizes
from tessera.models.families.family import Family, Tensor


def _sizes(keys: ConfigKeys) -> dict[str, Any]:
    keys.expect("use_sliding_window", False)
    # Without windows these have no effect.
    keys.skip("sliding_window", "max_window_layers")
    types = keys.take("layer_types", list, [])
    if any(kind != "full_attention" for kind in types):
        keys.refuse("layer_types", "only full_attention is supported")
    return read_sizes(keys, head_dim=128)


def _read(keys: ConfigKeys) -> DecoderConfig:
    return DecoderConfig(**_sizes(keys))


def _read_experts(keys: ConfigKeys) -> DecoderConfig:
    keys.expect("decoder_sparse_step", 1)
    keys.expect("mlp_only_layers", [])
    keys.skip("router_aux_loss_coef", "output_router_logits")
    sizes = _sizes(keys)
    return DecoderConfig(
        **sizes | {"mlp_dim": keys.take("moe_intermediate_size", int, 768)},
        num_experts=keys.take("num_experts", int, 128),
        experts_per_token=keys.take("num_experts_per_tok", int, 8),
        renormalize_experts=keys.take("norm_topk_prob", bool, False),
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {**write_sizes(config), "use_sliding_window": False}


def _write_experts(config: DecoderConfig) -> dict[str, Any]:
    return {
        **_write(config),
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
    tied=TIED,
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
    tied=TIED,
)
