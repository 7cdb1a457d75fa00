# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of completions, and what a token costs as rows become longer.

``tessera`` is ``Sampler``; ``transformers`` is ``generate`` of Hugging Face with its
cache, in another Python with as many threads, and with the same weights. The two take
turns. A model of four layers, 256 wide, and ``tiny`` continue 64 prompts of mixed
lengths; the former then continues one row to 2,048 tokens. Times include the prompts,
but no compilation.

    python benchmarks/generation.py [--quick] [--transformers PYTHON] [--json PATH]
"""

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import report

from tessera.train.models import (
    DecoderConfig,
    DecoderModel,
    config_of,
    save_pretrained,
)
from tessera.train.rollouts import Sampler

FOLDER = Path(__file__).parent / "peer_programs"
sys.path.append(str(FOLDER))

from peer_process import PeerProcess  # noqa: E402

# A Llama of 5 million parameters.
CONFIG = DecoderConfig(
    vocab_size=8192,
    d_model=256,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    mlp_dim=1024,
    global_every=1,
    norm_unit_offset=False,
    post_norms=False,
    qk_norm=False,
    activation="silu",
    scale_embedding=False,
)
MODELS = {"a Llama of 5 million parameters": CONFIG, "tiny": config_of("tiny")}
ROWS, LONGEST, TOKENS = 64, 256, 128
LENGTHS = (128, 512, 1024, 2048)


class Peer(PeerProcess):
    """A process that generates on demand."""

    def __init__(self, python: str, folder: str) -> None:
        program = FOLDER / "generate_transformers.py"
        super().__init__([python, str(program), folder, str(os.cpu_count())])

    def seconds(self, prompts: list[list[int]], tokens: int, *, sample: bool) -> float:
        """How long the completions of prompts take."""
        return self.ask({"prompts": prompts, "tokens": tokens, "sample": sample})


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--transformers", help="a Python with torch and transformers")
    options = parser.parse_args()
    rounds = 2 if options.quick else 5
    draw = np.random.default_rng(0)
    lengths = draw.integers(8, LONGEST + 1, ROWS)
    tables = dict[str, list[report.Row]]()
    for name, config in MODELS.items():
        model = DecoderModel(config)
        params = model.init(jax.random.key(0))
        prompts = [draw.integers(1, config.vocab_size, n).tolist() for n in lengths]
        with tempfile.TemporaryDirectory() as folder:
            peer = None
            if options.transformers:
                save_pretrained(params, folder, model=model)
                peer = Peer(options.transformers, folder)
            title = f"{name}: {ROWS} prompts of 8 to {LONGEST} tokens, {TOKENS} more"
            tables[title] = throughput(model, params, prompts, peer, rounds)
            if config is CONFIG:
                row = [draw.integers(1, config.vocab_size, 16).tolist()]
                long = LENGTHS[:2] if options.quick else LENGTHS
                title = "one row of so many tokens"
                tables[title] = costs(model, params, row, peer, long)
            if peer:
                peer.close()
    tables["bytes of keys and values"] = [cache_bytes(lengths)]
    report.show_all(tables, options.json)


def timed(sampler: Sampler, params: Any, prompts: list[list[int]]) -> float:
    """How long the completions of prompts take."""
    start = time.perf_counter()
    made = sampler.complete(params, prompts, jax.random.key(0))
    assert all(len(each.tokens) == sampler.num_tokens for each in made)
    return time.perf_counter() - start


def throughput(
    model: DecoderModel,
    params: Any,
    prompts: list[list[int]],
    peer: Peer | None,
    rounds: int,
) -> list[report.Row]:
    """Tokens per second of a batch, greedy and sampled."""
    rows = list[report.Row]()
    for sample in (False, True)[: 1 if rounds < 5 else 2]:
        sampler = Sampler(
            model,
            num_tokens=TOKENS,
            max_length=LONGEST + TOKENS,
            slots=ROWS,
            temperature=float(sample),
            cache_tokens=sum(len(prompt) + TOKENS + 32 for prompt in prompts),
        )
        seconds: dict[str, list[float]] = {"tessera": [], "transformers": []}
        for turn in range(rounds + 1):
            taken = {"tessera": timed(sampler, params, prompts)}
            if peer:
                taken["transformers"] = peer.seconds(prompts, TOKENS, sample=sample)
            for name, each in taken.items():
                seconds[name] += [each] if turn else []  # the first compiles
        for name, own in seconds.items():
            if own:
                rates = [ROWS * TOKENS / each for each in own]
                pairs = zip(own, seconds["tessera"], strict=True)
                row = {"who": name, "drawn": "sampled" if sample else "greedy"}
                row["tokens/s"] = report.extremes(rates, 2)
                ratios = [mine / ours for mine, ours in pairs]
                rows.append(row | {"times tessera's": report.extremes(ratios, 2)})
    return rows


def costs(
    model: DecoderModel,
    params: Any,
    row: list[list[int]],
    peer: Peer | None,
    lengths: tuple[int, ...],
) -> list[report.Row]:
    """Milliseconds of each token between two lengths."""
    seconds: dict[str, list[float]] = {"tessera": [], "transformers": []}
    for length in lengths:
        count = length - len(row[0])
        sampler = Sampler(
            model, num_tokens=count, max_length=max(lengths), slots=1, temperature=0.0
        )
        timed(sampler, params, row)
        seconds["tessera"].append(min(timed(sampler, params, row) for _ in range(3)))
        if peer:
            taken = [peer.seconds(row, count, sample=False) for _ in range(3)]
            seconds["transformers"].append(min(taken))
    rows = list[report.Row]()
    for name, own in seconds.items():
        before, start = 0.0, len(row[0])
        for length, taken in zip(lengths, own, strict=False):
            each = 1e3 * (taken - before) / (length - start)
            cells = {"who": name, "tokens": f"{start} to {length}"}
            rows.append(cells | {"ms a token": round(each, 3)})
            before, start = taken, length
    return rows


def cache_bytes(lengths: np.ndarray) -> report.Row:
    """Of all rows when they end, in blocks and as long as the longest."""
    token = 2 * 4 * CONFIG.num_layers * CONFIG.num_kv_heads * CONFIG.head_dim
    blocks = 32 * int(np.ceil((lengths + TOKENS) / 32).sum())
    return {
        "in blocks": token * blocks,
        "as long as the longest": token * ROWS * (LONGEST + TOKENS),
        "tokens alone": token * int((lengths + TOKENS).sum()),
    }


if __name__ == "__main__":
    main()
