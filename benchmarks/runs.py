# SPDX-License-Identifier: Apache-2.0
"""Steps that are ready to run: a batch, a state of their own, the compiled program."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from tessera.graph.compile_stages import Compiled
from tessera.graph.function import Function
from tessera.graph.pass_runner import BACKEND_PASSES
from tessera.train.config.step_config import StepConfig, batch_spec
from tessera.train.loop.step import make_train_step
from tessera.train.loop.train_state import TrainState, init_state


def random_batch(config: StepConfig, rows: int, length: int) -> dict[str, jax.Array]:
    """One step's batch, ``rows`` sequences in each microbatch, on the mesh."""
    shape = (config.accumulation, rows, length)
    words = config.model.config.vocab_size
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, words, (*shape[:2], length + 1), np.int32)
    batch = {
        "tokens": tokens[..., :-1],
        "targets": tokens[..., 1:],
        "segment_ids": np.ones(shape, np.int32),
        "positions": np.broadcast_to(np.arange(length, dtype=np.int32), shape),
    }
    return jax.device_put(batch, NamedSharding(config.mesh.jax, batch_spec(config)))


class Runner:
    """A step with a state of its own, to be called again and again."""

    def __init__(self, step: Callable[..., Any], state: Any, batch: Any) -> None:
        self.step, self.batch = step, batch
        self.state = jax.tree.map(jnp.copy, state)

    def __call__(self) -> Any:
        self.state, metrics = self.step(self.state, self.batch)
        return metrics


@dataclass(frozen=True)
class Prepared:
    """Tessera's step, and a step by hand where there is one, both compiled.

    Attributes:
      state: What both begin with.
      batch: What both are given.
      step: Tessera's step.
      compiled: The program it runs.
      by_hand: The function written by hand.
      twin: The program it runs.
    """

    state: TrainState
    batch: Any
    step: Function
    compiled: Compiled
    by_hand: Any = None
    twin: Any = None

    def runners(self) -> list[Runner]:
        """One for each step."""
        steps = [self.step] if self.twin is None else [self.step, self.by_hand]
        return [Runner(step, self.state, self.batch) for step in steps]


def prepared(
    config: StepConfig, batch: Any, by_hand: Callable[[StepConfig], Any] | None
) -> Prepared:
    """Make a state and compile; beside a step by hand, without backend passes."""
    state = init_state(config.model, config.optimizer, jax.random.key(0), config.mesh)
    step = make_train_step(config, state)
    if by_hand is None:
        return Prepared(state, batch, step, step.compile(state, batch))
    step = Function(step.body, step.options, skip_passes=BACKEND_PASSES)
    theirs = by_hand(config)
    # XLA compiles one program on one core; two take no longer than one.
    with ThreadPoolExecutor() as pool:
        compiling = pool.submit(step.compile, state, batch)
        twin = pool.submit(theirs.lower(state, batch).compile).result()
        compiled = compiling.result()
    return Prepared(state, batch, step, compiled, theirs, twin)
