# SPDX-License-Identifier: Apache-2.0
"""What a Tessera step costs over the same step written by hand.

For each mesh: the trainer's step beside ``jax.jit`` with ``NamedSharding`` of the same
model, optimizer and layouts. FLOPs are counted on the jaxpr, bytes accessed are XLA's,
collectives are read from the compiled program by kind, axes and bytes; the step times
alternate in one run, and their ratio is that of the medians.

    python benchmarks/overhead.py [--quick] [--json PATH]
"""

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from tessera.runtime.devices import simulate_devices

simulate_devices(8)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
import report  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from tessera.analysis.flops import bytes_accessed, count  # noqa: E402
from tessera.analysis.ledger import collectives  # noqa: E402
from tessera.mesh import Mesh  # noqa: E402
from tessera.models.model import Model  # noqa: E402
from tessera.models.registry import config_of  # noqa: E402
from tessera.training.clipping import global_norm  # noqa: E402
from tessera.training.optimizers import AdamWConfig, make_optimizer  # noqa: E402
from tessera.training.state import TrainState, init_state, state_specs  # noqa: E402
from tessera.training.step import Recipe, batch_spec, make_train_step  # noqa: E402

MESHES = {
    "one device": ((1,), ("fsdp",)),
    "dp": ((4,), ("dp",)),
    "fsdp": ((4,), ("fsdp",)),
    "tp": ((4,), ("tp",)),
    "fsdp×tp": ((2, 2), ("fsdp", "tp")),
}
ROWS, LENGTH = 16, 128


def recipe_on(sizes: tuple[int, ...], axes: tuple[str, ...]) -> Recipe:
    """The trainer's recipe for a small Gemma 3 on one mesh."""
    config = replace(
        config_of("tiny"), d_model=64, num_layers=2, mlp_dim=128, global_every=2
    )
    optimizer, learning_rate = make_optimizer(AdamWConfig(), steps=100, clip_norm=1.0)
    return Recipe(
        model=Model(config),
        optimizer=optimizer,
        learning_rate=learning_rate,
        mesh=Mesh(axes, devices=range(int(np.prod(sizes))), shape=sizes),
    )


def by_hand(recipe: Recipe) -> Callable[..., Any]:
    """The step as one writes it with JAX and Optax alone, around the same model."""
    place = recipe.model.place(recipe.mesh)
    specs = state_specs(recipe.model, recipe.optimizer, recipe.mesh)
    named = partial(NamedSharding, recipe.mesh.jax)

    def summed_loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        logits = recipe.model.module(params)(
            batch["tokens"],
            positions=batch["positions"],
            segment_ids=batch["segment_ids"],
            place=place,
        )
        labels = batch["targets"]
        logits = logits - jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True))
        total = jnp.log(jnp.exp(logits).sum(axis=-1))
        words = jax.lax.broadcasted_iota(labels.dtype, logits.shape, 2)
        chosen = jnp.where(words == labels[..., None], logits, 0.0).sum(-1)
        legal = (labels >= 0) & (labels < logits.shape[-1])
        losses = jnp.where(legal, total - chosen, jnp.nan)
        return jnp.where(labels != -100, losses, 0.0).sum()

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
        micro = {name: array[0] for name, array in batch.items()}
        loss, gradients = jax.value_and_grad(summed_loss)(state.params, micro)
        layouts = jax.tree.map(named, specs.params)
        gradients = jax.lax.with_sharding_constraint(gradients, layouts)
        tokens = (batch["targets"] != -100).sum(dtype=jnp.float32)
        share = 1.0 / jnp.maximum(tokens, 1.0)
        gradients = jax.tree.map(lambda g: g * share, gradients)
        updates, optimizer = recipe.optimizer.update(
            gradients, state.optimizer, state.params
        )
        metrics = {
            "loss": loss * share,
            "grad_norm": global_norm(gradients),
            "learning_rate": recipe.learning_rate(state.step),
            "tokens": tokens,
        }
        params = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, optimizer), metrics

    states = jax.tree.map(named, specs)
    return jax.jit(
        train_step,
        in_shardings=(states, named(batch_spec(recipe))),
        out_shardings=(states, named(P())),
        donate_argnums=0,
    )


class Runner:
    """A step with a state of its own, to be called again and again."""

    def __init__(self, step: Callable[..., Any], state: Any, batch: Any) -> None:
        self.step, self.state, self.batch = step, state, batch

    def __call__(self) -> Any:
        self.state, metrics = self.step(self.state, self.batch)
        return self.state, metrics


def compare(name: str, rounds: int) -> dict[str, Any]:
    """One row of the table: what differs, and the ratio of the step times."""
    recipe = recipe_on(*MESHES[name])
    tokens = np.random.default_rng(0).integers(0, 256, (1, ROWS, LENGTH + 1), np.int32)
    batch = {
        "tokens": tokens[..., :-1],
        "targets": tokens[..., 1:],
        "segment_ids": np.ones((1, ROWS, LENGTH), np.int32),
        "positions": np.broadcast_to(
            np.arange(LENGTH, dtype=np.int32), (1, ROWS, LENGTH)
        ),
    }
    batch = jax.device_put(batch, NamedSharding(recipe.mesh.jax, batch_spec(recipe)))
    state = init_state(recipe.model, recipe.optimizer, jax.random.key(0), recipe.mesh)
    ours, theirs = make_train_step(recipe, state), by_hand(recipe)
    # XLA compiles one program on one core; two take no longer than one.
    with ThreadPoolExecutor() as pool:
        ours_compiling = pool.submit(ours.compile, state, batch)
        twin = pool.submit(theirs.lower(state, batch).compile).result()
        compiled = ours_compiling.result()
    flops = [
        count(compiled.traced.graph.program).total,
        count(theirs.trace(state, batch).jaxpr).total,
    ]
    accessed = [bytes_accessed(compiled.jax), bytes_accessed(twin)]
    sent = [collectives(each, recipe.mesh).totals() for each in (compiled.jax, twin)]
    runs = [
        Runner(ours, jax.tree.map(jnp.copy, state), batch),
        Runner(theirs, jax.tree.map(jnp.copy, state), batch),
    ]
    report.alternate(runs, 3)
    seconds = report.alternate(runs, rounds)
    medians = [float(np.median(each)) for each in seconds]
    return {
        "mesh": name,
        "FLOPs": _same(*flops),
        "bytes accessed": _same(*accessed),
        "collectives": "equal" if sent[0] == sent[1] else f"{sent[0]} | {sent[1]}",
        "operations": sum(total.operations for total in sent[0].values()),
        "sent per device": sum(total.nbytes for total in sent[0].values()),
        "Tessera ms": report.spread(seconds[0]),
        "by hand ms": report.spread(seconds[1]),
        "ratio": round(medians[0] / medians[1], 4),
    }


def _same(ours: float, theirs: float) -> str:
    return f"{ours:.6g}, equal" if ours == theirs else f"{ours:.6g} | {theirs:.6g}"


def main(options: argparse.Namespace) -> None:
    """Compare on every mesh and show the table."""
    rounds = 10 if options.quick else 150
    names = ("one device", "fsdp×tp") if options.quick else MESHES
    rows = [compare(name, rounds) for name in names]
    report.show("Tessera's step beside the same step by hand", rows, options.json)


if __name__ == "__main__":
    main(report.arguments(__doc__))
