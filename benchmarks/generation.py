# SPDX-License-Identifier: Apache-2.0
"""Milliseconds of a generated token, for outputs of several lengths.

One prompt is continued greedily. With ``--transformers`` another Python, which has
PyTorch and Transformers, generates with a model of the same sizes, its cache, and as
many threads; the two take turns. Times include the prefill, but no compilation.

    python benchmarks/generation.py [--quick] [--transformers PYTHON] [--json PATH]
"""

import dataclasses
import json
import os
import subprocess
import time
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np
import report

from tessera.train.models import DecoderModel, Sampler, config_of

PEER = Path(__file__).parent / "peer_programs" / "generate_transformers.py"
PROMPT = 32


class Peer:
    """A process that generates on demand: a number in, seconds out."""

    def __init__(self, python: str, sizes: dict[str, Any]) -> None:
        command = [python, str(PEER), json.dumps(sizes), str(PROMPT)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def generate(self, num_tokens: int) -> float:
        """Seconds of an output of so many tokens."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{num_tokens}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        """End it."""
        self._process.communicate()


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--transformers", help="a Python with torch and transformers")
    parser.add_argument("--model", default="gemma3_270m")
    options = parser.parse_args()
    lengths = (32, 128) if options.quick else (32, 128, 512)
    rounds = 2 if options.quick else 5
    config = config_of(options.model)
    model = DecoderModel(config)
    sampler = Sampler(model, model.init(jax.random.key(0)))
    prompt = np.random.default_rng(0).integers(0, config.vocab_size, (1, PROMPT))

    def ours(num_tokens: int) -> float:
        start = time.perf_counter()
        key = jax.random.key(0)
        tokens = sampler.stream(prompt, num_tokens, key, temperature=0.0)
        assert len(list(tokens)) == num_tokens
        return time.perf_counter() - start

    runs = {"tessera": ours}
    peer = None
    if options.transformers:
        sizes = dataclasses.asdict(config) | {"threads": os.cpu_count()}
        peer = Peer(options.transformers, sizes)
        runs["transformers"] = peer.generate
    seconds: dict[tuple[str, int], list[float]] = {}
    for turn in range(rounds + 1):
        for length in lengths:
            for name, run in runs.items():
                taken = run(length)
                if turn:  # the first compiles
                    seconds.setdefault((name, length), []).append(taken)
    if peer:
        peer.close()
    rows: list[report.Row] = []
    for (name, length), taken in seconds.items():
        own = seconds["tessera", length]
        ratios = [each / other for each, other in zip(taken, own, strict=True)]
        each = [1e3 * second / length for second in taken]
        row = {"who": name, "tokens": length, "ms a token": _spread(each)}
        rows.append(row | {"times tessera's": _spread(ratios)})
    report.show(f"generation, {options.model}", rows, options.json)


def _spread(numbers: list[float]) -> str:
    """The median, the least and the most."""
    return f"{median(numbers):.2f} [{min(numbers):.2f}, {max(numbers):.2f}]"


if __name__ == "__main__":
    main()
