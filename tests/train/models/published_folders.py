# SPDX-License-Identifier: Apache-2.0
"""Writes small folders as models are published, through the safetensors library."""

import json
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

GEMMA3: Mapping[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 48,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "intermediate_size": 32,
    "sliding_window": 8,
    "query_pre_attn_scalar": 6,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "linear",
            "rope_theta": 1_000_000.0,
            "factor": 8.0,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "dtype": "bfloat16",
    "transformers_version": "5.2.0",
}
# Of one layer, by the sizes in the configuration.
_LAYER = {
    "input_layernorm": ("hidden_size",),
    "post_attention_layernorm": ("hidden_size",),
    "pre_feedforward_layernorm": ("hidden_size",),
    "post_feedforward_layernorm": ("hidden_size",),
    "self_attn.q_norm": ("head_dim",),
    "self_attn.k_norm": ("head_dim",),
    "self_attn.q_proj": ("queries", "hidden_size"),
    "self_attn.k_proj": ("keys", "hidden_size"),
    "self_attn.v_proj": ("keys", "hidden_size"),
    "self_attn.o_proj": ("hidden_size", "queries"),
    "mlp.gate_proj": ("intermediate_size", "hidden_size"),
    "mlp.up_proj": ("intermediate_size", "hidden_size"),
    "mlp.down_proj": ("hidden_size", "intermediate_size"),
}


def tensor(name: str, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    """Numbers by a formula, other ones for each name."""
    h = np.arange(math.prod(shape), dtype=np.uint64) + np.uint64(
        zlib.crc32(name.encode())
    )
    h = (h * np.uint64(2654435761)) & np.uint64(0xFFFFFFFF)
    return ((h / 2**32 - 0.5) / 2).reshape(shape).astype(dtype)


def gemma3_tensors(
    values: Mapping[str, Any] = GEMMA3, dtype: Any = np.float32
) -> dict[str, np.ndarray]:
    """All tensors of a Gemma 3 model, in Hugging Face's names."""
    sizes = dict(values)
    sizes["queries"] = values["num_attention_heads"] * values["head_dim"]
    sizes["keys"] = values["num_key_value_heads"] * values["head_dim"]
    shapes = {
        "model.embed_tokens.weight": (values["vocab_size"], values["hidden_size"]),
        "model.norm.weight": (values["hidden_size"],),
    }
    for i in range(values["num_hidden_layers"]):
        for name, dims in _LAYER.items():
            shapes[f"model.layers.{i}.{name}.weight"] = tuple(sizes[d] for d in dims)
    return {name: tensor(name, shape, dtype) for name, shape in shapes.items()}


def write_folder(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    values: Mapping[str, Any] = GEMMA3,
    *,
    shards: int = 1,
) -> Path:
    """A folder with these tensors in one file, or in several with an index."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(values))
    names = list(tensors)
    if shards == 1:
        safetensors.numpy.save_file(dict(tensors), path / "model.safetensors")
        return path
    files = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = names[i::shards]
        safetensors.numpy.save_file({n: tensors[n] for n in part}, path / file)
        files |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": files}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path
