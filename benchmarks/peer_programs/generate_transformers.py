# SPDX-License-Identifier: Apache-2.0
"""Generates with Gemma 3 of Transformers: a number of tokens in, seconds out."""

import json
import sys
import time

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig


def main() -> None:
    sizes, length = json.loads(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(sizes["threads"])
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["d_model"],
        intermediate_size=sizes["mlp_dim"],
        num_hidden_layers=sizes["num_layers"],
        num_attention_heads=sizes["num_heads"],
        num_key_value_heads=sizes["num_kv_heads"],
        head_dim=sizes["head_dim"],
        sliding_window=sizes["window"],
        query_pre_attn_scalar=sizes["query_pre_attn_scalar"],
        eos_token_id=None,
    )
    model = Gemma3ForCausalLM(config).eval()
    prompt = torch.randint(0, sizes["vocab_size"], (1, length))
    mask = torch.ones_like(prompt)
    for line in sys.stdin:
        start = time.perf_counter()
        with torch.no_grad():
            out = model.generate(
                prompt,
                attention_mask=mask,
                max_new_tokens=int(line),
                do_sample=False,
                use_cache=True,
            )
        assert out.shape[1] == length + int(line)
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main()
