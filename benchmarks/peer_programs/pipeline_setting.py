# SPDX-License-Identifier: Apache-2.0
"""The model that all contestants of ``peer_pipelines.py`` run, and how they answer."""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TextIO, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

Tree: TypeAlias = Any
# Gives loss and gradients when it is called; and its temporary bytes, where known.
Step: TypeAlias = tuple[Callable[[], tuple[Any, Tree]], int | None]

# Stages of each device, by schedule.
CHUNKS: Final = {
    "gpipe": 1,
    "1f1b": 1,
    "interleaved": 2,
    "zero_bubble": 1,
    "dualpipev": 2,
}


@dataclass(frozen=True)
class Setting:
    """A residual MLP, its batch, and the pipeline.

    Attributes:
      reference: A file of loss and gradients in plain JAX, as ``np.savez`` writes it.
    """

    reference: str
    devices: int = 4
    layers: int = 8
    microbatches: int = 8
    rows: int = 2048
    width: int = 256
    hidden: int = 1024

    def layers_of_stage(self, schedule: str) -> int:
        """Each stage has as many layers."""
        return self.layers // (self.devices * CHUNKS[schedule])

    def arrays(self) -> tuple[list[dict[str, Any]], Any, Any]:
        """Weights of each layer, the input and the target, in f32."""
        draw = np.random.default_rng(0)

        def normal(*shape: int, scale: float = 1.0) -> Any:
            return (draw.normal(size=shape) * scale).astype(np.float32)

        up, down = (self.width, self.hidden), (self.hidden, self.width)
        weights = [
            {name: normal(*shape, scale=shape[0] ** -0.5) for name, shape in pair}
            for pair in [[("up", up), ("down", down)]] * self.layers
        ]
        shape = (self.rows, self.width)
        return weights, normal(*shape), normal(*shape)


def layer(x: Any, weights: Tree) -> Any:
    """One of the equal layers, on ``[rows, width]``."""
    return x + jnp.tanh(x @ weights["up"]) @ weights["down"]


def error(out: Any, target: Any) -> Any:
    """The loss."""
    return jnp.mean((out - target) ** 2)


def loss_of(weights: Tree, x: Any, target: Any) -> Any:
    """The loss in plain JAX."""
    for each in weights:
        x = layer(x, each)
    return error(x, target)


def write_reference(setting: Setting) -> None:
    """Loss and gradients of the whole batch on one device."""
    found = jax.jit(jax.value_and_grad(loss_of))(*setting.arrays())
    np.savez(setting.reference, *jax.tree.leaves(found))


def take_output() -> TextIO:
    """Where answers go: whatever a library prints from now on is none."""
    out, sys.stdout = sys.stdout, sys.stderr
    return out


def serve(
    out: TextIO,
    setting: Setting,
    version: str,
    make: Callable[[str, str], Step],
) -> None:
    """Answer each line ``[schedule, remat, steps]`` with what the steps took.

    Args:
      out: Where to answer.
      setting: The model.
      version: What the contestant is made with.
      make: Compiles the step of a schedule and a policy of rematerialization.
    """
    print(json.dumps({"version": version}), file=out, flush=True)
    want = [*np.load(setting.reference).values()]
    steps: dict[tuple[str, str], Step] = {}
    for line in sys.stdin:
        *case, count = json.loads(line)
        seconds, apart = [], [0.0, 0.0]
        for _ in range(count):
            begin = time.process_time()
            step = steps.get(tuple(case)) or make(*case)
            loss, gradients = jax.block_until_ready(step[0]())
            seconds.append(time.process_time() - begin)
            steps[tuple(case)] = step
            far = [*map(_apart, [loss, *jax.tree.leaves(gradients)], want)]
            apart = [max(apart[0], far[0]), max(apart[1], *far[1:])]
        answer = {"seconds": seconds, "apart": apart, "temporaries": step[1]}
        print(json.dumps(answer), file=out, flush=True)


def _apart(got: Any, want: Any) -> float:
    got = np.asarray(got)
    assert got.shape == want.shape
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))
