# SPDX-License-Identifier: Apache-2.0
"""Writes gemma3_golden.json: the logits of Hugging Face's Gemma 3 for a small model.

Run it by hand in an environment of its own, never in that of the project:

    pip install torch==2.13.0 transformers==5.23.0
    python make_gemma3_golden.py

The weights follow a formula of their name, so only tokens and logits are stored; the
test that reads the file (test_gemma3_parity.py) repeats the formula.
"""

import json
import math
import zlib
from pathlib import Path

import numpy as np

CONFIG = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "sliding_window": 5,
    "query_pre_attn_scalar": 12,
}
GLOBAL_ROPE = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0}
LOCAL_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
BATCH, LENGTH = 2, 17


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Evenly spread numbers from an integer hash of (name, index)."""
    mask = np.uint64(0xFFFFFFFF)
    h = np.arange(math.prod(shape), dtype=np.uint64) * np.uint64(2654435761)
    h = (h + np.uint64(zlib.crc32(name.encode()))) & mask
    h ^= h >> np.uint64(15)
    h = (h * np.uint64(2246822519)) & mask
    h ^= h >> np.uint64(13)
    scale = 0.6 if len(shape) == 1 else math.sqrt(12 / shape[1])
    return (scale * (h / 2**32 - 0.5)).reshape(shape).astype(np.float32)


def main() -> None:
    # Here, so that collecting doctests does not need them.
    import torch
    import transformers

    config = transformers.Gemma3TextConfig(
        **CONFIG,
        rope_parameters={
            "full_attention": GLOBAL_ROPE,
            "sliding_attention": LOCAL_ROPE,
        },
        attn_implementation="eager",
    )
    model = transformers.Gemma3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(weight(name, tuple(parameter.shape))))
        tokens = (np.arange(BATCH * LENGTH) ** 2 * 7 + 3) % CONFIG["vocab_size"]
        tokens = tokens.reshape(BATCH, LENGTH)
        logits = model(torch.from_numpy(tokens), use_cache=False).logits.numpy()
    golden = {
        "made_with": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": np.__version__,
        },
        "config": CONFIG,
        "layer_types": config.layer_types,
        "rope": {"global": GLOBAL_ROPE, "local": LOCAL_ROPE},
        "parameters": {n: list(p.shape) for n, p in model.named_parameters()},
        "tokens": tokens.tolist(),
        "logits": [[[float(f"{x:.8g}") for x in row] for row in b] for b in logits],
    }
    path = Path(__file__).with_name("gemma3_golden.json")
    path.write_text(json.dumps(golden) + "\n")


if __name__ == "__main__":
    main()
