# SPDX-License-Identifier: Apache-2.0
"""What one call of a compiled step costs the host, beside ``jax.jit``.

The step adds one number to each array of a dict: programs so small that a call is the
host's work alone. Calls alternate in one run; the fastest of many rounds is each one's
time, and what Tessera adds is the difference. It must stay below 10 µs and 0.1 µs for
each array.

    python benchmarks/dispatch.py [--quick] [--json PATH]
"""

import argparse
from collections.abc import Callable
from statistics import median
from time import thread_time
from typing import Any

import jax
import jax.numpy as jnp
import report

import tessera as ts

LEAVES = (1, 10, 100, 300)
CALLS = 20


def step(state: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
    """As little work for each array as there can be."""
    return {name: array + x for name, array in state.items()}


def microseconds(call: Callable[..., Any], *args: Any) -> float:
    """The calling thread's own time for one call among a few."""
    begun = thread_time()
    for _ in range(CALLS):
        results = call(*args)
    spent = thread_time() - begun
    jax.block_until_ready(results)
    return 1e6 * spent / CALLS


def compare(leaves: int, rounds: int) -> dict[str, Any]:
    """One row of the table."""
    state = {f"p{i:03}": jnp.zeros(()) for i in range(leaves)}
    args = (state, jnp.ones(()))
    contestants = {"Tessera": ts.function(step), "jax.jit": jax.jit(step)}
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for call in contestants.values():
        jax.block_until_ready(call(*args))
    for _ in range(rounds):
        for name, call in contestants.items():
            times[name].append(microseconds(call, *args))
    ours, theirs = (min(times[name]) for name in ("Tessera", "jax.jit"))
    return {
        "arrays": leaves + 1,
        **{
            f"{name} µs": f"{min(spent):.1f}, median {median(spent):.1f}"
            for name, spent in times.items()
        },
        "added µs": round(ours - theirs, 1),
        "budget µs": round(10 + 0.1 * (leaves + 1), 1),
    }


def main(options: argparse.Namespace) -> None:
    """Compare for each number of arrays and show the table."""
    rounds = 30 if options.quick else 300
    rows = [compare(leaves, rounds) for leaves in LEAVES]
    report.show("What a call of a compiled step costs the host", rows, options.json)


if __name__ == "__main__":
    main(report.arguments(__doc__))
