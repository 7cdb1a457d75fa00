# SPDX-License-Identifier: Apache-2.0
"""Tokenizes JSON lines with ``datasets.map``; run by ``benchmarks/tokenization.py``.

    python peer_datasets.py <lines> <tokenizer> <cache> <processes>

Prints tokens, the seconds of ``map``, and those of reading the file into Arrow.
"""

import json
import sys
import time
from typing import Any

import datasets
from tokenizers import Tokenizer

lines, tokenizer_file, cache, processes = sys.argv[1:]
tokenizer = Tokenizer.from_file(tokenizer_file)


def encode(batch: dict[str, Any]) -> dict[str, Any]:
    """The ids of the texts of a batch."""
    encodings = tokenizer.encode_batch_fast(batch["text"], add_special_tokens=False)
    return {"ids": [encoding.ids for encoding in encodings]}


if __name__ == "__main__":
    datasets.disable_progress_bars()
    begin = time.perf_counter()
    texts = datasets.load_dataset(
        "json", data_files=lines, cache_dir=cache, split="train"
    )
    read = time.perf_counter()
    encoded = texts.map(
        encode, batched=True, num_proc=int(processes), remove_columns=["text"]
    )
    end = time.perf_counter()
    tokens = sum(len(chunk.flatten()) for chunk in encoded.data["ids"].chunks)
    print(json.dumps({"tokens": tokens, "seconds": end - read, "read": read - begin}))
