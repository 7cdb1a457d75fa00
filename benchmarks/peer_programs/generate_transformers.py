# SPDX-License-Identifier: Apache-2.0
"""Generates with a folder's model in Transformers: a request in, seconds out.

A request is a line of JSON: prompts, the tokens to add, and whether to sample.
"""

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    folder, threads = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for line in sys.stdin:
        request = json.loads(line)
        prompts, count = request["prompts"], request["tokens"]
        width = max(map(len, prompts))
        pads = [width - len(prompt) for prompt in prompts]
        rows = [[0] * pad + p for pad, p in zip(pads, prompts, strict=True)]
        masks = [[0] * pad + [1] * (width - pad) for pad in pads]
        start = time.perf_counter()
        with torch.no_grad():
            out = model.generate(
                torch.tensor(rows),
                attention_mask=torch.tensor(masks),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=request["sample"],
                use_cache=True,
                pad_token_id=0,
            )
        assert out.shape[1] == width + count
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main()
