# SPDX-License-Identifier: Apache-2.0
"""The fused loss beside losses that have all logits: memory and time.

For each vocabulary the loss and its gradients by tokens and weight, three ways:
``op.fused_linear_cross_entropy``, ``op.cross_entropy`` of logits, and
``jax.nn.log_softmax`` of logits as people write it. Temporary memory is XLA's; times
alternate in one run, and ratios are those of the medians over the fused one's.

    python benchmarks/loss.py [--quick] [--dtype f32|bf16] [--json PATH]
"""

import argparse
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import report

from tessera import op
from tessera.shard import as_dtype

# Vocabulary, tokens and width.
CPU_SIZES = ((32_768, 2048, 256), (262_144, 512, 256))
GPU_SIZES = ((32_768, 16_384, 2048), (262_144, 8192, 2048))

Loss = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def fused(
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    chunk_size: int | None = None,
) -> jax.Array:
    """Logits by chunks of tokens."""
    return op.fused_linear_cross_entropy(hidden, weight, labels, chunk_size=chunk_size)


def full(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
    """All logits, in f32, and Tessera's loss of them."""
    logits = jnp.matmul(hidden, weight.T, preferred_element_type=jnp.float32)
    return op.cross_entropy(logits, labels)


def by_hand(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
    """All logits, and the label's place looked up in their ``log_softmax``."""
    logits = jnp.matmul(hidden, weight.T, preferred_element_type=jnp.float32)
    found = jax.nn.log_softmax(logits, axis=-1)
    return -jnp.take_along_axis(found, labels[:, None], axis=-1).mean()


def compiled(loss: Loss, operands: Any) -> Any:
    """The program of a loss and its gradients by tokens and weight."""
    return jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*operands).compile()


def measure(
    size: tuple[int, int, int], dtype: Any, rounds: int, chunks: tuple[int, ...]
) -> list[report.Row]:
    """A row for each way."""
    words, tokens, width = size
    report.progress(f"vocabulary {words}")
    keys = jax.random.split(jax.random.key(0), 3)
    operands = (
        jax.random.normal(keys[0], (tokens, width), dtype),
        jax.random.normal(keys[1], (words, width), dtype) * width**-0.5,
        jax.random.randint(keys[2], (tokens,), 0, words),
    )
    ways: dict[str, Loss] = {"fused": fused, "full": full, "by hand": by_hand}
    ways |= {f"fused, {rows}": partial(fused, chunk_size=rows) for rows in chunks}
    programs = {name: compiled(way, operands) for name, way in ways.items()}
    runs = [partial(program, *operands) for program in programs.values()]
    report.alternate(runs, 1)
    seconds = dict(zip(programs, report.alternate(runs, rounds), strict=True))
    memory = {
        name: program.memory_analysis().temp_size_in_bytes
        for name, program in programs.items()
    }
    return [
        {
            "vocabulary": words,
            "tokens": tokens,
            "way": name,
            "temporaries MB": round(memory[name] / 1e6, 1),
            "memory": f"{memory[name] / memory['full']:.3f}",
            "ms [quartiles]": report.spread(seconds[name]),
            "least ms": f"{min(seconds[name]) * 1e3:.1f}",
            "time": f"{median(seconds[name]) / median(seconds['full']):.2f}",
        }
        for name in programs
    ]


def main(options: argparse.Namespace) -> None:
    """Print the table."""
    on_cpu = jax.default_backend() == "cpu"
    sizes = CPU_SIZES if on_cpu else GPU_SIZES
    dtype, rounds = as_dtype(options.dtype), 4 if options.quick else 15
    chunks = () if options.quick else (128, 256, 512) if on_cpu else (1024, 2048, 4096)
    rows = [row for size in sizes for row in measure(size, dtype, rounds, chunks)]
    title = (
        f"Loss and gradients, {options.dtype}, width {sizes[0][2]}; "
        "memory and time as shares of those of full logits"
    )
    report.show(title, rows, options.json)


if __name__ == "__main__":
    arguments = report.parser(__doc__)
    arguments.add_argument("--dtype", default="f32", choices=("f32", "bf16"))
    main(arguments.parse_args())
