# SPDX-License-Identifier: Apache-2.0
"""What it takes from the call of a new training step to its executable.

The step is forward, backward and SGD of residual blocks, unrolled or scanned, beside
the same step in ``jax.jit`` with ``jax.value_and_grad``. It is written with ``ts.grad``
by an argument, or with ``graph.backward`` by parameters of its own; the one of
``on a mesh`` has declared layouts over four devices. Both sides compile in turns in one
process, each time with all of JAX's caches empty. Times are CPU seconds of all threads,
which a busy machine hardly changes, the least of all rounds; the last column has the
ratio by the clock.

    python benchmarks/compile_time.py [--quick] [--json PATH] [--layers 10 30]
    python benchmarks/compile_time.py --without-xla  the phases before XLA alone
"""

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

from tessera.dist import simulate_devices

simulate_devices(4)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import report  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import tessera as ts  # noqa: E402
from tessera import graph  # noqa: E402
from tessera.tracing import scope  # noqa: E402

Phase: TypeAlias = tuple[str, float, float]
Phases: TypeAlias = Iterator[str]

LAYERS = (10, 30, 60, 100, 200)
ROWS, WIDTH, HIDDEN = 8, 16, 32
SHAPES = {"scale": (WIDTH,), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
LAYOUTS = {"scale": P(), "up": P(None, "tp"), "down": P("tp", None)}
RATE = 0.1


def block(weights: dict[str, Any], x: Any) -> Any:
    """One residual block on ``[rows, width]``."""
    size = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    y = x * jax.lax.rsqrt(size + 1e-6) * weights["scale"]
    return x + jax.nn.gelu(y @ weights["up"]) @ weights["down"]


def loss_of(weights: Any, x: Any) -> Any:
    """Of all blocks: unrolled for a list of them, else scanned."""
    if isinstance(weights, list):
        for each in weights:
            x = block(each, x)
    else:
        x, _ = jax.lax.scan(lambda x, each: (block(each, x), None), x, weights)
    return jnp.mean(jnp.square(x))


def updated(weights: Any, gradients: Any) -> Any:
    """SGD."""
    return jax.tree.map(lambda w, g: w - RATE * g, weights, gradients)


def by_grad(weights: Any, x: Any) -> Any:
    """Tessera's step, with the gradient of a loss that was computed."""
    loss = loss_of(weights, x)
    return updated(weights, ts.grad(loss, weights)), loss


def by_backward(depth: int, x: Any) -> Any:
    """The same by parameters that the step owns."""
    weights = []
    for index in range(depth):
        with scope.named(f"block_{index}"):
            weights.append(
                {
                    name: scope.parameter(name, shape, init="normal")
                    for name, shape in SHAPES.items()
                }
            )
    loss = loss_of(weights, x)
    owned = {f"block_{index}": each for index, each in enumerate(weights)}
    return updated(owned, graph.backward(loss)), loss


def by_jax(weights: Any, x: Any) -> Any:
    """The step in plain JAX."""
    loss, gradients = jax.value_and_grad(loss_of)(weights, x)
    return updated(weights, gradients), loss


def arguments(layers: int, *, is_scanned: bool) -> tuple[Any, Any]:
    """The types of a step's weights and of its data."""

    def struct(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    x = struct(ROWS, WIDTH)
    if is_scanned:
        return {n: struct(layers, *shape) for n, shape in SHAPES.items()}, x
    return [{n: struct(*s) for n, s in SHAPES.items()} for _ in range(layers)], x


def contestants(
    variant: str, layers: int
) -> tuple[Callable[[], Phases], Callable[[], Phases]]:
    """The phases of Tessera's step and of that of JAX."""
    weights, x = arguments(layers, is_scanned=variant == "scanned")
    if variant == "graph.backward":
        step = partial(by_backward, layers)
        ours = partial(tessera_phases, lambda: graph.training_step("step")(step), x)
        return ours, partial(jax_phases, {}, weights, x)
    if variant != "on a mesh":
        ours = partial(tessera_phases, lambda: ts.function(by_grad), weights, x)
        return ours, partial(jax_phases, {}, weights, x)
    mesh = ts.Mesh(("dp", "tp"), devices=range(4), shape=(2, 2))
    layouts = [LAYOUTS] * layers
    options = {
        "mesh": mesh,
        "in_specs": {"weights": layouts, "x": P("dp")},
        "out_specs": (layouts, P()),
    }
    placed = [
        {name: NamedSharding(mesh.jax, spec) for name, spec in LAYOUTS.items()}
    ] * layers
    theirs = {
        "in_shardings": (placed, NamedSharding(mesh.jax, P("dp"))),
        "out_shardings": (placed, NamedSharding(mesh.jax, P())),
    }
    ours = partial(tessera_phases, lambda: ts.function(by_grad, **options), weights, x)
    return ours, partial(jax_phases, theirs, weights, x)


VARIANTS = ("ts.grad", "graph.backward", "on a mesh", "scanned")


def tessera_phases(make: Callable[[], Any], *args: Any) -> Phases:
    """Each phase of Tessera, once it is done; the caller takes the time."""
    traced = make().trace(*args)
    yield "trace"
    traced.passes  # noqa: B018 - runs them
    yield "passes"
    lowered = traced.lower()
    yield "lower"
    lowered.compile()
    yield "compile"


def jax_phases(options: dict[str, Any], *args: Any) -> Phases:
    """The same of ``jax.jit``."""
    traced = jax.jit(by_jax, **options).trace(*args)
    yield "trace"
    lowered = traced.lower()
    yield "lower"
    lowered.compile()
    yield "compile"


def timed(run: Callable[[], Phases], *, with_xla: bool) -> list[Phase]:
    """The phases of a run with empty caches: name, CPU seconds, seconds."""
    jax.clear_caches()
    gc.collect()
    found = []
    phases = run()
    cpu, clock = time.process_time(), time.perf_counter()
    for name in phases:
        now = time.process_time(), time.perf_counter()
        found.append((name, now[0] - cpu, now[1] - clock))
        cpu, clock = now
        if name == "lower" and not with_xla:
            break
    return found


def compare(
    variant: str, layers: int, rounds: int, *, with_xla: bool
) -> dict[str, Any]:
    """One row of the table."""
    report.progress(f"{variant}, {layers} layers")
    pair = contestants(variant, layers)
    runs: list[list[list[Phase]]] = [[], []]
    for index in range(rounds):
        for side in (0, 1) if index % 2 == 0 else (1, 0):
            runs[side].append(timed(pair[side], with_xla=with_xla))
    ours, theirs = (least(side) for side in runs)
    before = [sum(t for n, t in x.items() if n != "compile") for x in (ours, theirs)]
    row = {
        "step": variant,
        "layers": layers,
        **{f"{name} ms": _pair(name, ours, theirs) for name in ours},
        "until lowered": round(before[0] / before[1], 2),
    }
    if with_xla:
        row["until executable"] = round(sum(ours.values()) / sum(theirs.values()), 3)
        totals = [min(sum(c for *_, c in run) for run in side) for side in runs]
        row["by the clock"] = round(totals[0] / totals[1], 3)
        row["spread"] = " | ".join(_spread(side) for side in runs)
    return row


def least(runs: Sequence[Sequence[Phase]]) -> dict[str, float]:
    """The least CPU seconds of each phase."""
    names = [name for name, *_ in runs[0]]
    return {n: min(run[i][1] for run in runs) for i, n in enumerate(names)}


def _pair(name: str, ours: dict[str, float], theirs: dict[str, float]) -> str:
    sides = (side.get(name) for side in (ours, theirs))
    return " | ".join("-" if x is None else f"{x * 1e3:.0f}" for x in sides)


def _spread(runs: Sequence[Sequence[Phase]]) -> str:
    totals = sorted(sum(cpu for _, cpu, _ in run) for run in runs)
    return f"{totals[0] * 1e3:.0f} to {totals[-1] * 1e3:.0f} ms"


def main(options: argparse.Namespace) -> None:
    """Compare every step and show the table: Tessera | jax.jit."""
    layers = options.layers or (LAYERS[:2] if options.quick else LAYERS)
    rounds = options.rounds or (2 if options.quick else 5)
    rows = [
        compare(variant, count, rounds, with_xla=not options.without_xla)
        for variant in options.steps or VARIANTS
        for count in layers
    ]
    title = "From the call to the executable, Tessera | jax.jit"
    report.show(title, rows, options.json)


if __name__ == "__main__":
    parser = report.parser(__doc__)
    parser.add_argument("--layers", type=int, nargs="+")
    parser.add_argument("--steps", nargs="+", choices=VARIANTS)
    parser.add_argument("--rounds", type=int, help="of both sides in turns")
    parser.add_argument("--without-xla", action="store_true", help="end at lowering")
    main(parser.parse_args())
