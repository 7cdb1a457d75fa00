# SPDX-License-Identifier: Apache-2.0
"""The configuration of a small model: two layers, one with a window and one without."""

from tessera.train.models import DecoderConfig

SMALL = DecoderConfig(
    vocab_size=64,
    d_model=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=64,
    window=8,
    query_pre_attn_scalar=8,
    global_every=2,
)
