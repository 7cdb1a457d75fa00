# SPDX-License-Identifier: Apache-2.0
"""What ``orient_matmuls`` gains in time and costs in memory, on CPU.

Training steps (forward, backward, SGD) of eight layers, compiled with the pass and
without it: CPU seconds of a step, taken in turns, and XLA's temporaries.

    python benchmarks/weight_gradients.py [--quick] [--json PATH]
"""

import argparse
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import report

import tessera as ts

Layer: TypeAlias = Callable[[dict[str, Any], Any], Any]
LAYERS, WIDTH, ROWS, LENGTH = 8, 256, 8, 128
PASS = "orient_matmuls"


def saturating(activation: Callable[[Any], Any]) -> Layer:
    """A layer whose derivative reads its result."""
    return lambda w, x: activation(activation(x @ w["up"]) @ w["down"])


def residual(w: dict[str, Any], x: Any) -> Any:
    """An MLP after a norm, as in a decoder."""
    size = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    y = x * jax.lax.rsqrt(size + 1e-6)
    return x + jax.nn.gelu(y @ w["up"]) @ w["down"]


def attention(w: dict[str, Any], x: Any) -> Any:
    """One head of attention and the MLP."""
    q, k, v = (x @ w[name] for name in ("query", "key", "value"))
    chances = jax.nn.softmax(q @ k.swapaxes(-1, -2) / WIDTH**0.5)
    return residual(w, x + (chances @ v) @ w["out"])


MODELS: dict[str, tuple[Layer, int]] = {
    "tanh, one width": (saturating(jnp.tanh), WIDTH),
    "tanh, twice as wide inside": (saturating(jnp.tanh), 2 * WIDTH),
    "sigmoid, four times as wide": (saturating(jax.nn.sigmoid), 4 * WIDTH),
    "residual MLP": (residual, 4 * WIDTH),
    "residual MLP, rematerialized": (jax.checkpoint(residual), 4 * WIDTH),
    "attention and MLP": (attention, 4 * WIDTH),
}


def step_of(layer: Layer) -> Callable[[Any, Any], Any]:
    """A training step."""

    def step(weights: Any, x: Any) -> Any:
        for each in weights:
            x = layer(each, x)
        gradients = ts.grad(jnp.mean(jnp.square(x)), weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)

    return step


def weights_of(layer: Layer, hidden: int) -> list[dict[str, jax.Array]]:
    """The first weights."""
    shapes = {"up": (WIDTH, hidden), "down": (hidden, WIDTH)}
    if layer is attention:
        names = ("query", "key", "value", "out")
        shapes |= dict.fromkeys(names, (WIDTH, WIDTH))
    keys = iter(jax.random.split(jax.random.key(0), LAYERS * len(shapes)))
    return [
        {n: jax.random.normal(next(keys), s) / s[0] ** 0.5 for n, s in shapes.items()}
        for _ in range(LAYERS)
    ]


def compare(name: str, rounds: int) -> report.Row:
    """One row of the table."""
    report.progress(name)
    layer, hidden = MODELS[name]
    weights = weights_of(layer, hidden)
    x = jax.random.normal(jax.random.key(1), (ROWS, LENGTH, WIDTH))
    steps = [ts.function(step_of(layer), skip_passes=s) for s in ((), (PASS,))]
    sizes = [
        step.compile(weights, x).jax.memory_analysis().temp_size_in_bytes
        for step in steps
    ]
    spent: list[list[float]] = [[], []]
    for _ in range(rounds + 1):
        for step, seconds in zip(steps, spent, strict=True):
            begun = time.process_time()
            jax.block_until_ready(step(weights, x))
            seconds.append(time.process_time() - begun)
    ours, theirs = (seconds[1:] for seconds in spent)
    return {
        "model": name,
        "with, CPU ms": report.spread(ours),
        "without, CPU ms": report.spread(theirs),
        "time ratio": round(min(ours) / min(theirs), 3),
        "with, MB": round(sizes[0] / 1e6, 2),
        "without, MB": round(sizes[1] / 1e6, 2),
        "memory ratio": round(sizes[0] / sizes[1], 3),
    }


def main(options: argparse.Namespace) -> None:
    """Compare each model and show the table."""
    rounds = 3 if options.quick else 15
    rows = [compare(name, rounds) for name in MODELS]
    report.show("Steps with orient_matmuls and without", rows, options.json)


if __name__ == "__main__":
    main(report.arguments(__doc__))
