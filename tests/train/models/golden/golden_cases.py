# SPDX-License-Identifier: Apache-2.0
"""The models whose golden numbers are in this folder; imports NumPy alone.

Each is the ``config.json`` of a tiny model. Weights, tokens and the probes of gradients
follow formulas, so that only results are stored.
"""

import math
import zlib

import numpy as np

BATCH, LENGTH = 2, 40

_SIZES = {
    "vocab_size": 64,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "max_position_embeddings": 128,
}
_LLAMA = {**_SIZES, "model_type": "llama", "rms_norm_eps": 1e-5, "hidden_act": "silu"}
_QWEN = {**_SIZES, "rms_norm_eps": 1e-6, "hidden_act": "silu"}
_BASE = {"rope_theta": 500.0}

CASES = {
    "gemma3": {
        **_SIZES,
        "model_type": "gemma3_text",
        "num_hidden_layers": 7,
        "sliding_window": 5,
        "query_pre_attn_scalar": 12,
        "layer_types": ["sliding_attention"] * 5
        + ["full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {
                "rope_type": "linear",
                "factor": 8.0,
                "rope_theta": 1_000_000.0,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    },
    "gemma3_soft_cap": {
        **_SIZES,
        "model_type": "gemma3_text",
        "sliding_window": 5,
        "query_pre_attn_scalar": 8,
        "final_logit_softcapping": 2.0,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
    "gemma2": {
        **_SIZES,
        "model_type": "gemma2",
        "sliding_window": 5,
        "query_pre_attn_scalar": 12,
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 3.0,
        "rope_parameters": {**_BASE, "rope_type": "default"},
    },
    "llama3": {
        **_LLAMA,
        "rope_parameters": {
            **_BASE,
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "llama_linear": {
        **_LLAMA,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "rope_parameters": {**_BASE, "rope_type": "linear", "factor": 4.0},
    },
    "llama_yarn": {
        **_LLAMA,
        "rope_parameters": {
            **_BASE,
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 4.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 32,
        },
    },
    "mistral": {
        **_LLAMA,
        "model_type": "mistral",
        "sliding_window": 7,
        "rope_parameters": {**_BASE, "rope_type": "default"},
    },
    "mistral_yarn": {
        **_LLAMA,
        "model_type": "mistral",
        "num_hidden_layers": 2,
        "sliding_window": 7,
        "rope_parameters": {
            **_BASE,
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 4.0,
            "mscale": 2.0,
            "mscale_all_dim": 0.5,
            "original_max_position_embeddings": 32,
        },
    },
    "qwen3_windows": {
        **_QWEN,
        "model_type": "qwen3",
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 1,
        "rope_parameters": {**_BASE, "rope_type": "linear", "factor": 4.0},
    },
    "qwen3": {
        **_QWEN,
        "model_type": "qwen3",
        "tie_word_embeddings": True,
        "rope_parameters": {**_BASE, "rope_type": "default"},
    },
    "qwen3_moe": {
        **_QWEN,
        "model_type": "qwen3_moe",
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
        "rope_parameters": {**_BASE, "rope_type": "default"},
    },
    "qwen2": {
        **_QWEN,
        "model_type": "qwen2",
        "rope_parameters": {**_BASE, "rope_type": "default"},
    },
    "olmo2": {
        **_LLAMA,
        "model_type": "olmo2",
        "pad_token_id": 0,
        "rope_parameters": {**_BASE, "rope_type": "default"},
    },
    "olmo3": {
        **_LLAMA,
        "model_type": "olmo3",
        "pad_token_id": 0,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "sliding_window": 7,
        "rope_parameters": {
            "full_attention": {
                **_BASE,
                "rope_type": "yarn",
                "factor": 4.0,
                "beta_fast": 4.0,
                "original_max_position_embeddings": 32,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    },
    "gpt_oss": {
        **_SIZES,
        "model_type": "gpt_oss",
        "sliding_window": 7,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "intermediate_size": 16,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            **_BASE,
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 4.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 32,
        },
    },
    "phi3_longrope": {
        **_LLAMA,
        "model_type": "phi3",
        "head_dim": 6,  # as Transformers checks the factors
        "pad_token_id": 0,
        "original_max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "partial_rotary_factor": 0.67,
        "rope_parameters": {
            **_BASE,
            "rope_type": "longrope",
            "short_factor": [1.5, 2.5],
            "long_factor": [3.0, 5.0],
        },
    },
    "phi3": {
        **_LLAMA,
        "model_type": "phi3",
        "pad_token_id": 0,
        "sliding_window": 7,
        "rope_parameters": {**_BASE, "rope_type": "default"},
    },
}


def weight(case: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A tensor of a case; norms scale by about 1.

    Those of Gemma add 1 to their weight: twice that scale, in each norm of seven
    layers, would multiply the rounding of both sides by ten.
    """
    adds_one = CASES[case]["model_type"].startswith("gemma")
    return spread(name, shape, float(name.endswith("norm.weight") and not adds_one))


def spread(name: str, shape: tuple[int, ...], center: float) -> np.ndarray:
    """Numbers evenly spread around a center, from a hash of (name, index)."""
    mask = np.uint64(0xFFFFFFFF)
    h = np.arange(math.prod(shape), dtype=np.uint64) * np.uint64(2654435761)
    h = (h + np.uint64(zlib.crc32(name.encode()))) & mask
    h ^= h >> np.uint64(15)
    h = (h * np.uint64(2246822519)) & mask
    h ^= h >> np.uint64(13)
    scale = 0.6 if len(shape) == 1 else math.sqrt(12 / shape[1])
    return (center + scale * (h / 2**32 - 0.5)).reshape(shape).astype(np.float32)


def tokens() -> np.ndarray:
    """The batch, int64 ``[BATCH, LENGTH]``."""
    numbers = (np.arange(BATCH * LENGTH) ** 2 * 7 + 3) % _SIZES["vocab_size"]
    return numbers.reshape(BATCH, LENGTH)


def summary(name: str, gradient: np.ndarray) -> list[float]:
    """A gradient's product with fixed numbers, and its norm."""
    center = float(name.endswith("norm.weight"))
    probe = spread(f"probe of {name}", gradient.shape, center).astype(np.float64)
    wide = gradient.astype(np.float64)
    return [float((probe * wide).sum()), float(np.sqrt((wide * wide).sum()))]
