# SPDX-License-Identifier: Apache-2.0
"""``compare_layouts`` of the trainer's step: agreement, or the line that differs."""

import dataclasses
import inspect

import jax
import numpy as np
import optax
import pytest

import tessera as ts
from tessera.train.config.step_config import StepConfig
from tessera.train.loop.step import make_train_step
from tessera.train.loop.train_state import abstract_state, init_state
from tessera.train.models import DecoderConfig, DecoderModel

# Each traces, compiles and runs the trainer's step with every value as an output.
pytestmark = pytest.mark.full

CONFIG = DecoderConfig(
    vocab_size=32,
    d_model=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=32,
    window=8,
    query_pre_attn_scalar=8,
    global_every=1,
)


@pytest.fixture
def mesh():
    return ts.Mesh(["dp", "tp"], devices=range(4), shape=(2, 2))


def config_for(mesh):
    return StepConfig(
        model=DecoderModel(CONFIG),
        optimizer=optax.sgd(0.1),
        learning_rate=optax.constant_schedule(0.1),
        mesh=mesh,
    )


def batch():
    tokens = np.random.default_rng(0).integers(0, 32, (1, 4, 9), np.int32)
    return {
        "tokens": tokens[..., :-1],
        "targets": tokens[..., 1:],
        "segment_ids": np.ones((1, 4, 8), np.int32),
        "positions": np.broadcast_to(np.arange(8, dtype=np.int32), (1, 4, 8)),
    }


def first_state(mesh):
    config = config_for(mesh)
    return init_state(config.model, config.optimizer, jax.random.key(0), mesh)


def step_for(config):
    return make_train_step(config, abstract_state(config.model, config.optimizer))


def test_a_step_of_the_trainer_is_the_same_on_a_mesh(mesh):
    report = ts.compare_layouts(
        lambda mesh: step_for(config_for(mesh)),
        (first_state(mesh), batch()),
        mesh,
    )
    assert report.agrees, report
    assert report.compared > 100
    # Those inside of the regions that look up and exchange rows of the embedding.
    assert report.alone < 20


def test_where_a_step_of_the_trainer_depends_on_the_mesh_is_named(mesh):
    def make(mesh):
        rate = 0.1 * mesh.size  # the mistake: nobody asked for it

        def descend(updates, state, params=None):
            return jax.tree.map(lambda u: u * -rate, updates), state

        plain = config_for(mesh)
        optimizer = optax.GradientTransformation(plain.optimizer.init, descend)
        return step_for(dataclasses.replace(plain, optimizer=optimizer))

    first = ts.compare_layouts(make, (first_state(mesh), batch()), mesh).first
    lines, start = inspect.getsourcelines(make)
    (place,) = [i for i, line in enumerate(lines) if "u * -rate" in line]
    assert first.site.operation == "mul"
    assert first.site.source == f"{__file__}:{start + place}"
