# SPDX-License-Identifier: Apache-2.0
"""The models that have a name."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import jax
from flax import nnx

from tessera.errors import UnknownModelError, did_you_mean
from tessera.models.gemma3 import Gemma3
from tessera.models.gemma3_config import Gemma3Config

CONFIGS: Final[Mapping[str, Gemma3Config]] = MappingProxyType(
    {
        # Bytes and eight special tokens.
        "tiny": Gemma3Config(
            vocab_size=264,
            d_model=128,
            num_layers=6,
            num_heads=4,
            num_kv_heads=2,
            head_dim=32,
            mlp_dim=512,
            window=64,
            query_pre_attn_scalar=32,
        ),
        # The same with eight experts in the place of each MLP, a token in two of them.
        "moe_tiny": Gemma3Config(
            vocab_size=264,
            d_model=128,
            num_layers=6,
            num_heads=4,
            num_kv_heads=2,
            head_dim=32,
            mlp_dim=128,
            window=64,
            query_pre_attn_scalar=32,
            num_experts=8,
        ),
        "gemma3_270m": Gemma3Config(
            vocab_size=262_144,
            d_model=640,
            num_layers=18,
            num_heads=4,
            num_kv_heads=1,
            head_dim=256,
            mlp_dim=2048,
            window=512,
            query_pre_attn_scalar=256,
        ),
        "gemma3_1b": Gemma3Config(
            vocab_size=262_144,
            d_model=1152,
            num_layers=26,
            num_heads=4,
            num_kv_heads=1,
            head_dim=256,
            mlp_dim=6912,
            window=512,
            query_pre_attn_scalar=256,
        ),
        # 64 rows more than its siblings: the image tokens of the multimodal model.
        "gemma3_4b": Gemma3Config(
            vocab_size=262_208,
            d_model=2560,
            num_layers=34,
            num_heads=8,
            num_kv_heads=4,
            head_dim=256,
            mlp_dim=10_240,
            window=1024,
            query_pre_attn_scalar=256,
            rope_scale_global=8.0,
        ),
    }
)


def config_of(name: str) -> Gemma3Config:
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


def build(model: str | Gemma3Config, key: jax.Array) -> Gemma3:
    """A model with fresh parameters on the default device, as an nnx module.

    ``Model(config).init(key, mesh)`` makes the same values already sharded.

    Args:
      model: A name of the registry, or a configuration.
      key: The same key gives the same parameters.

    Raises:
      UnknownModelError: [T403] there is no such model.
    """
    config = config_of(model) if isinstance(model, str) else model
    return Gemma3(config, rngs=nnx.Rngs(params=key))
