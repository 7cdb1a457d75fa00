# SPDX-License-Identifier: Apache-2.0
"""What calls of a compiled step cost the host, beside ``jax.jit``, and its memory.

The step adds one number to each array of a dict: programs so small that a call is the
host's work alone. Calls repeat, or take turns between shapes or between training and
evaluation, so that each needs another program than the one before. Tessera and
``jax.jit`` alternate in one run; the fastest of many rounds is each one's time, and
what Tessera adds is the difference. It must stay below 10 µs and 0.1 µs for each array.

A training loop of 10,000 calls, with evaluation after every tenth, then shows whether
time and memory depend on the number of calls.

    python benchmarks/dispatch.py [--quick] [--json PATH]
"""

import argparse
import gc
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from resource import getpagesize
from statistics import median
from time import thread_time
from typing import Any

import jax
import jax.numpy as jnp
import report

import tessera as ts

ARRAYS = (1, 10, 100, 300)
SHAPES = {"repeated": 1, "2 shapes": 2, "32 shapes": 32}
MODES = "training, evaluation"
# Each time is of about as many calls, whatever the number of programs.
CALLS = 32
LOOP, QUICK_LOOP = 10_000, 1000

State = dict[str, jax.Array]
Calls = list[Callable[[], Any]]


def step(state: State, x: jax.Array, training: bool) -> State:
    """As little work for each array as there can be."""
    if training:
        return {name: array + x for name, array in state.items()}
    return {name: array - x for name, array in state.items()}


def calls_of(case: str, arrays: int, function: Callable[..., Any]) -> Calls:
    """One call for each program of a case."""

    def call(size: int, training: bool) -> Callable[[], Any]:
        # One array is the number that is added.
        state = {f"p{i:03}": jnp.zeros(size) for i in range(arrays - 1)}
        x = jnp.ones(size)
        return lambda: function(state, x, training)

    if case == MODES:
        return [call(1, training) for training in (True, False)]
    return [call(size, True) for size in range(1, SHAPES[case] + 1)]


def microseconds(calls: Calls) -> float:
    """The calling thread's own time for one of some calls that take turns."""
    rounds = max(1, CALLS // len(calls))
    begun = thread_time()
    for _ in range(rounds):
        results = [call() for call in calls]
    spent = thread_time() - begun
    jax.block_until_ready(results)
    return 1e6 * spent / (rounds * len(calls))


def compare(case: str, arrays: int, rounds: int) -> dict[str, Any]:
    """One row of the table of calls."""
    contestants = {
        "Tessera": calls_of(case, arrays, ts.function(step)),
        "jax.jit": calls_of(case, arrays, jax.jit(step, static_argnums=2)),
    }
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for calls in contestants.values():
        for call in calls * 2:
            jax.block_until_ready(call())
    for _ in range(rounds):
        for name, calls in contestants.items():
            times[name].append(microseconds(calls))
    ours, theirs = (min(times[name]) for name in ("Tessera", "jax.jit"))
    budget = 10 + 0.1 * arrays
    return {
        "calls": case,
        "arrays": arrays,
        **{
            f"{name} µs": f"{min(spent):.1f}, median {median(spent):.1f}"
            for name, spent in times.items()
        },
        "ratio": round(ours / theirs, 2),
        "added µs": round(ours - theirs, 1),
        "budget µs": round(budget, 1),
        "within": ours - theirs <= budget,
    }


def resident_bytes() -> int:
    """The memory of this process that is in RAM."""
    gc.collect()
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * getpagesize()


def training_loop(
    training: Callable[..., Any], evaluate: Callable[..., Any]
) -> Iterator[None]:
    """Steps of gradient descent on a small model, with evaluation after every tenth."""
    keys = jax.random.split(jax.random.key(0), 20)
    weights = {f"w{i:02}": jax.random.normal(k, (8, 8)) / 3 for i, k in enumerate(keys)}
    batch = jnp.ones((4, 8))
    for count in itertools.count(1):
        _, weights = training(weights, batch)
        if count % 10 == 0:
            jax.block_until_ready(evaluate(weights, batch))
        yield


def loss_of(weights: State, batch: jax.Array) -> jax.Array:
    """The mean square of an MLP's result."""
    for array in weights.values():
        batch = jnp.tanh(batch @ array)
    return jnp.mean(batch**2)


def functions(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The training step of a contestant and its evaluation."""

    def updated(weights: State, slopes: State) -> State:
        return {name: w - 0.01 * slopes[name] for name, w in weights.items()}

    def ours(weights: State, batch: jax.Array) -> tuple[jax.Array, State]:
        loss = loss_of(weights, batch)
        return loss, updated(weights, ts.grad(loss, weights))

    def theirs(weights: State, batch: jax.Array) -> tuple[jax.Array, State]:
        loss, slopes = jax.value_and_grad(loss_of)(weights, batch)
        return loss, updated(weights, slopes)

    if name == "Tessera":
        return ts.function(ours, donate=["weights"]), ts.function(loss_of)
    return jax.jit(theirs, donate_argnums=0), jax.jit(loss_of)


def endure(name: str, length: int) -> dict[str, Any]:
    """One row of the table of a long loop: its first tenth is for warming up."""
    steps = training_loop(*functions(name))
    tenth = length // 10
    memory, times = [], []
    for _ in range(10):
        begun = thread_time()
        for _ in range(tenth):
            next(steps)
        times.append(1e6 * (thread_time() - begun) / tenth)
        memory.append(resident_bytes())
    growth = memory[-1] / memory[0] - 1
    return {
        "loop": name,
        "calls": length,
        "RSS after a tenth, MiB": round(memory[0] / 2**20, 1),
        "RSS at the end, MiB": round(memory[-1] / 2**20, 1),
        "growth": f"{growth:.2%}",
        "within 1 %": abs(growth) <= 0.01,
        "second tenth µs": round(times[1], 1),
        "last tenth µs": round(times[-1], 1),
    }


def main(options: argparse.Namespace) -> None:
    """Compare each way to call for each number of arrays, then the long loops."""
    rounds = 20 if options.quick else 300
    counts = ARRAYS[:3] if options.quick else ARRAYS
    rows = []
    # The last case leaves the heap in pieces, which slows every later one.
    for case in ("repeated", "2 shapes", MODES, "32 shapes"):
        report.progress(case)
        # 32 programs of 300 arrays would take a minute to compile.
        cases = [n for n in counts if case != "32 shapes" or n <= 100]
        rows += [compare(case, arrays, rounds) for arrays in cases]
    length = QUICK_LOOP if options.quick else LOOP
    report.progress(f"{length:,} calls")
    loops = [endure(name, length) for name in ("Tessera", "jax.jit")]
    report.show_all(
        {
            "What a call of a compiled step costs the host": rows,
            "What does not depend on the number of calls": loops,
        },
        options.json,
    )


if __name__ == "__main__":
    main(report.arguments(__doc__))
