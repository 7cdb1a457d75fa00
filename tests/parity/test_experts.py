# SPDX-License-Identifier: Apache-2.0
"""Experts on meshes: after three steps, the losses and parameters of one device.

The model is ``moe_tiny`` with a third of its layers; sequences and windows are short
for time. A router's losses are of one microbatch, so all runs have as many. They take
the same optimizer. Its epsilon is of the size of gradients, not of their rounding: Adam
divides a gradient by its own size, so where that is nothing but rounding, it would make
whole steps of it.
"""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from tessera.mesh import Mesh
from tessera.train.config.optimizer_config import AdamWConfig
from tessera.train.config.step_config import StepConfig, batch_spec
from tessera.train.loop.optimizers import make_optimizer
from tessera.train.loop.pipelined_model import schedule_of
from tessera.train.loop.step import make_train_step
from tessera.train.loop.train_state import init_state
from tessera.train.models import DecoderModel, config_of
from tessera.train.models.decoder.expert_mlp import ROUTER_METRICS
from tessera.train.models.pipeline_stages import split_of

pytestmark = pytest.mark.full

STEPS, MICROBATCHES, ROWS, LENGTH = 3, 2, 16, 16
CONFIG = dataclasses.replace(
    config_of("moe_tiny"), num_layers=2, window=8, global_every=2
)
KEY = jax.random.key(0)


def batches() -> list[dict[str, np.ndarray]]:
    """Random tokens, of which a quarter of the targets do not count."""
    draw = np.random.default_rng(0)
    shape, column = (1, ROWS, LENGTH), np.arange(LENGTH, dtype=np.int32)
    found = []
    for _ in range(STEPS):
        tokens = draw.integers(0, 264, (1, ROWS, LENGTH + 1), np.int32)
        ignored = draw.random(shape) < 0.25
        batch = {
            "tokens": tokens[..., :-1],
            "targets": np.where(ignored, np.int32(-100), tokens[..., 1:]),
            "segment_ids": np.broadcast_to(1 + column // 10, shape),
            "positions": np.broadcast_to(column % 10, shape),
        }
        found.append(
            {
                name: array.reshape(MICROBATCHES, -1, LENGTH)
                for name, array in batch.items()
            }
        )
    return found


@dataclasses.dataclass
class Run:
    """Metrics of all steps, and the parameters after the last."""

    metrics: list[dict[str, float]]
    params: Any


def train(
    axes: tuple[str, ...],
    sizes: tuple[int, ...],
    *,
    sync_every: int = 1,
    **config: Any,
) -> Run:
    mesh = Mesh(axes, devices=range(math.prod(sizes)), shape=sizes)
    model = DecoderModel(
        dataclasses.replace(CONFIG, **config), split=split_of(mesh, CONFIG, 1)
    )
    adamw = AdamWConfig(epsilon=1e-4)
    optimizer, rate = make_optimizer(adamw, steps=STEPS, clip_norm=1.0)
    config = StepConfig(
        model=model,
        optimizer=optimizer,
        learning_rate=rate,
        mesh=mesh,
        accumulation=MICROBATCHES,
        sync_every=sync_every,
        schedule=schedule_of(mesh, "zero_bubble", 1, MICROBATCHES),
        loss_chunk="auto",
    )
    state = init_state(model, optimizer, KEY, mesh)
    step = make_train_step(config, state)
    place = NamedSharding(mesh.jax, batch_spec(config))
    metrics = []
    for batch in batches():
        state, numbers = step(state, jax.device_put(batch, place))
        metrics.append({name: float(value) for name, value in numbers.items()})
    params = model.plain(jax.tree.map(np.asarray, state.params))
    return Run(metrics, jax.tree.map(np.asarray, params))


def check(
    run: Run, expected: Run, names: tuple[str, ...] = ("loss", *ROUTER_METRICS)
) -> None:
    for got, want in zip(run.metrics, expected.metrics, strict=True):
        for name in names:
            np.testing.assert_allclose(got[name], want[name], rtol=2e-5, err_msg=name)
    losses = [metrics["loss"] for metrics in expected.metrics]
    assert np.ptp(losses) > 0.02, "the losses have to move to be worth comparing"
    wanted = jax.tree_util.tree_leaves_with_path(expected.params)
    for (path, want), got in zip(wanted, jax.tree.leaves(run.params), strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        difference = np.linalg.norm(got - want) / np.linalg.norm(want)
        assert difference <= 2e-5, (name, difference)


# Between two exchanges each device balances its own tokens, so a seldom exchange has no
# losses of routers.
OFF = {"router_balance_weight": 0.0, "router_z_weight": 0.0}


@pytest.fixture(scope="module")
def dropless() -> Run:
    return train(("dp",), (1,), **OFF)


@pytest.fixture(scope="module")
def balanced() -> Run:
    return train(("dp",), (1,))


@pytest.mark.parametrize(
    ("axes", "sizes"),
    [(("ep_outer", "ep"), (2, 4)), (("dp", "ep", "tp"), (2, 2, 2))],
    ids=lambda value: "_".join(map(str, value)),
)
def test_dropless_experts_learn_what_they_learn_on_one_device(axes, sizes, dropless):
    check(train(axes, sizes, **OFF), dropless)


def test_gradients_that_are_exchanged_less_often_are_the_same_gradients(dropless):
    run = train(("dp", "ep"), (2, 2), sync_every=2, **OFF)
    check(run, dropless, names=("loss",))


@pytest.mark.parametrize(
    ("axes", "sizes"),
    [(("fsdp", "ep"), (2, 4)), (("pp", "ep"), (2, 2))],
    ids=lambda value: "_".join(map(str, value)),
)
def test_the_losses_of_routers_are_the_same_on_every_mesh(axes, sizes, balanced):
    check(train(axes, sizes), balanced)
