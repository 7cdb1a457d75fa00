# SPDX-License-Identifier: Apache-2.0
"""The configurations of named models."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

import jax
from flax import nnx

from tessera.errors import UnknownModelError, did_you_mean
from tessera.models.decoder.config import DecoderConfig
from tessera.models.decoder.decoder import Decoder

# Bytes and eight special tokens.
_TINY: Final = DecoderConfig(
    vocab_size=264,
    d_model=128,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    mlp_dim=512,
    window=64,
    query_pre_attn_scalar=32,
)
_GEMMA3_270M: Final = DecoderConfig(
    vocab_size=262_144,
    d_model=640,
    num_layers=18,
    num_heads=4,
    num_kv_heads=1,
    head_dim=256,
    mlp_dim=2048,
    window=512,
    query_pre_attn_scalar=256,
)
CONFIGS: Final[Mapping[str, DecoderConfig]] = MappingProxyType(
    {
        "tiny": _TINY,
        # Eight narrow experts instead of each MLP, two of them for each token.
        "moe_tiny": replace(_TINY, mlp_dim=128, num_experts=8),
        "gemma3_270m": _GEMMA3_270M,
        "gemma3_1b": replace(_GEMMA3_270M, d_model=1152, num_layers=26, mlp_dim=6912),
        "gemma3_4b": replace(
            _GEMMA3_270M,
            # 64 rows more than the others: the image tokens of the multimodal model.
            vocab_size=262_208,
            d_model=2560,
            num_layers=34,
            num_heads=8,
            num_kv_heads=4,
            mlp_dim=10_240,
            window=1024,
            rope_scale_global=8.0,
        ),
    }
)


def config_of(name: str) -> DecoderConfig:
    """The configuration of a named model.

    Raises:
      UnknownModelError: [T403] there is no such model.

    Example:
      >>> config_of("tiny").num_heads
      4
    """
    if name not in CONFIGS:
        raise UnknownModelError(
            f"there is no model {name!r}", fix=did_you_mean(name, CONFIGS)
        )
    return CONFIGS[name]


def build(model: str | DecoderConfig, key: jax.Array) -> Decoder:
    """An nnx module with newly initialized parameters on the default device.

    ``Model(config).init(key, mesh)`` creates the same values already sharded.

    Args:
      model: A name in the registry, or a configuration.
      key: The same key gives the same parameters.

    Raises:
      UnknownModelError: [T403] there is no such model.
    """
    config = config_of(model) if isinstance(model, str) else model
    return Decoder(config, rngs=nnx.Rngs(params=key))
