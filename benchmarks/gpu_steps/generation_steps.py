# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of ``gemma3_270m``, beside Transformers with the same sizes."""

import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import jax
import numpy as np
from gpu_steps.rows import QUICK, emit, errors_kept

from tessera.train.models import DecoderConfig, DecoderModel, config_of
from tessera.train.models.families.published_files import Published
from tessera.train.rollouts import Sampler

MODEL, PROMPT, COUNT = ("tiny", 8, 4) if QUICK else ("gemma3_270m", 128, 128)
BATCHES = (1,) if QUICK else (1, 16)


def generation() -> None:
    """Transformers, which compiles nothing, and Tessera; greedily, in bf16."""
    config = config_of(MODEL)
    if find_spec("torch") and find_spec("transformers"):
        with errors_kept("generation", who="transformers"):
            by_transformers(config)
    model = DecoderModel(config)
    params = jax.tree.map(lambda x: x.astype("bfloat16"), model.init(jax.random.key(0)))
    for rows in BATCHES:
        draw = np.random.default_rng(0)
        sampler = Sampler(
            model,
            num_tokens=COUNT,
            max_length=PROMPT + COUNT,
            slots=rows,
            temperature=0.0,
            cache_tokens=rows * (PROMPT + COUNT),
        )
        prompt = draw.integers(0, config.vocab_size, (rows, PROMPT))

        def run(sampler: Sampler = sampler, prompt: Any = prompt) -> int:
            (first, *_) = sampler.complete(params, prompt, jax.random.key(0))
            return len(first.tokens)

        timed("tessera", rows, run)


def timed(who: str, rows: int, run: Callable[[], int]) -> None:
    """A row: the least of two runs after the one that compiles."""
    with errors_kept("generation", who=who, rows=rows):
        times = []
        for _ in range(3):
            start = time.perf_counter()
            assert run() == COUNT
            times.append(time.perf_counter() - start)
        least = min(times[1:])
        emit(
            "generation",
            who=who,
            rows=rows,
            first_s=round(times[0], 1),
            tokens_s=round(rows * COUNT / least),
            ms_a_token=round(1e3 * least / COUNT, 2),
        )


def by_transformers(sizes: DecoderConfig) -> None:
    """Gemma 3 of Transformers, with its cache."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    values = Published().config_values(sizes, {}) | {"eos_token_id": None}
    config = Gemma3TextConfig(**values)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Gemma3ForCausalLM(config).eval().to(device, torch.bfloat16)
    for rows in BATCHES:
        shape = (rows, PROMPT)
        prompt = torch.randint(0, sizes.vocab_size, shape, device=device)

        def run(prompt: Any = prompt) -> int:
            with torch.no_grad():
                out = model.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    max_new_tokens=COUNT,
                    min_new_tokens=COUNT,
                    do_sample=False,
                    use_cache=True,
                )
            return out.cpu().shape[1] - prompt.shape[1]

        timed("transformers", rows, run)
