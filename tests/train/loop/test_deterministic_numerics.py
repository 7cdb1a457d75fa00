# SPDX-License-Identifier: Apache-2.0
"""Deterministic numerics: the same bits after three steps, on every mesh and in any
number of microbatches.
"""

import dataclasses
import hashlib
from functools import cache
from math import prod
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from tessera.mesh import Mesh
from tessera.ops.loss_scale import LossScale
from tessera.train.config.optimizer_config import AdamWConfig
from tessera.train.config.step_config import StepConfig, batch_spec
from tessera.train.loop.deterministic_numerics import FixedOrder
from tessera.train.loop.optimizers import make_optimizer
from tessera.train.loop.step import make_eval_step, make_train_step
from tessera.train.loop.train_state import init_state
from tessera.train.models import DecoderModel
from tessera.train.models.pipeline_stages import split_of
from tests.small_model import SMALL

# Three layers, so that the second of two stages has padding; each has a window, and so
# one is compiled for all.
CONFIG = dataclasses.replace(SMALL, num_layers=3, global_every=4)
ROWS, LENGTH = 48, 16
# Each axis alone, and others beside stages. Three do not divide the parts.
MESHES = ["dp3", "fsdp4", "tp2", "cp4", "pp2", "pp2_dp2_fsdp2", "pp2_tp2"]


def mesh_of(name: str) -> Mesh:
    sizes = {part.rstrip("0123456789"): int(part[-1]) for part in name.split("_")}
    count = prod(sizes.values())
    return Mesh(list(sizes), devices=range(count), shape=tuple(sizes.values()))


def make_batch(seed: int, microbatches: int) -> dict[str, Any]:
    """Rows of which different shares of the targets do not count."""
    draw = np.random.default_rng(seed)
    tokens = draw.integers(0, 64, (ROWS, LENGTH + 1), np.int32)
    hidden = draw.random((ROWS, LENGTH)) < np.linspace(0, 0.7, ROWS)[:, None]
    rows = {
        "tokens": tokens[..., :-1],
        "targets": np.where(hidden, np.int32(-100), tokens[..., 1:]),
        "segment_ids": np.ones((ROWS, LENGTH), np.int32),
        "positions": np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1)),
    }
    return {
        name: array.reshape(microbatches, -1, LENGTH) for name, array in rows.items()
    }


def digest(tree: Any) -> str:
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()[:12]


def without_stages(model: DecoderModel, tree: Any) -> Any:
    """A tree that has trees like the parameters in it, those without stages."""

    def has_blocks(node: Any) -> bool:
        return isinstance(node, dict) and model.blocks in node

    def plain(node: Any) -> Any:
        return model.plain(node) if has_blocks(node) else node

    return jax.tree.map(plain, tree, is_leaf=has_blocks)


@cache
def run(
    name: str,
    reduction_parts: int | None = 8,
    microbatches: int = 2,
    **options: Any,
) -> dict[str, str]:
    """Three steps of AdamW with clipping; hashes of all that comes out of them."""
    mesh = mesh_of(name)
    split = split_of(mesh, CONFIG, 1)
    optimizer, rate = make_optimizer(AdamWConfig(), steps=20, clip_norm=0.5)
    config = StepConfig(
        model=DecoderModel(CONFIG, dtype=options.pop("dtype", None), split=split),
        optimizer=optimizer,
        learning_rate=rate,
        mesh=mesh,
        accumulation=microbatches,
        reduction_parts=reduction_parts,
        **options,
    )
    state = init_state(
        config.model,
        optimizer,
        jax.random.key(0),
        mesh,
        zero_stage=config.zero_stage,
    )
    scale = LossScale.dynamic() if config.model.dtype == "float16" else None
    state = dataclasses.replace(state, loss_scale=scale)
    step = make_train_step(config, state)
    sharding = NamedSharding(mesh.jax, batch_spec(config))
    shown = []
    for seed in range(3):
        batch = make_batch(seed, microbatches)
        state, metrics = step(state, jax.device_put(batch, sharding))
        shown.append(metrics)
    micro = {name: array[0] for name, array in make_batch(3, 2).items()}
    assert float(metrics["grad_norm"]) > 0.5  # So that clipping took part.
    return {
        "loss": digest([metrics["loss"] for metrics in shown]),
        "grad_norm": digest([metrics["grad_norm"] for metrics in shown]),
        "params": digest(without_stages(config.model, state.params)),
        "optimizer": digest(without_stages(config.model, state.optimizer)),
        "evaluation": digest(make_eval_step(config)(state.params, micro)),
    }


@pytest.mark.full
@pytest.mark.parametrize("name", MESHES)
def test_every_mesh_gives_the_same_bits(name):
    assert run(name) == run("dp1")


def test_the_devices_of_every_axis_share_the_reduction_parts():
    order = FixedOrder(mesh_of("pp2_fsdp2_tp2"), DecoderModel(CONFIG), {}, 8)
    assert order.axes == ("pp", "fsdp", "tp")
    assert order.of_rows(4).axes == ("pp", "fsdp")
    assert order.of_rows(3).axes == ()


@pytest.mark.full
@pytest.mark.parametrize(("name", "microbatches"), [("dp1", 1), ("fsdp2_tp2_cp2", 4)])
def test_every_division_into_microbatches_gives_the_same_bits(name, microbatches):
    assert run(name, microbatches=microbatches) == run("dp1")


@pytest.mark.full
def test_every_run_gives_the_same_bits():
    first = run("tp2")
    jax.clear_caches()
    assert run.__wrapped__("tp2") == first


@pytest.mark.full
def test_fast_numerics_differ_from_mesh_to_mesh():
    assert run("dp2", None)["params"] != run("dp1", None)["params"]


@pytest.mark.full
def test_settings_beside_it_give_the_same_bits_on_every_mesh():
    options = {"zero_stage": 2, "dtype": "float16"}
    assert run("dp2_tp2", **options) == run("dp1", **options)
