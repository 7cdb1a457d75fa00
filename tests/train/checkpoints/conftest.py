# SPDX-License-Identifier: Apache-2.0
"""Runs of a tiny model on any mesh, and states with a number in every place."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tessera.train.config.mesh_shape import mesh_of_shape
from tessera.train.config.optimizer_config import AdamWConfig
from tessera.train.config.run_config import Config, ModelConfig, TrainingConfig
from tessera.train.data.data_config import DataConfig, SyntheticConfig
from tessera.train.loop.build_run import Run
from tessera.train.loop.train_state import TrainState
from tessera.train.models import DecoderConfig

CONFIG = DecoderConfig(
    vocab_size=64,
    d_model=16,
    num_layers=5,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    mlp_dim=32,
    window=8,
    query_pre_attn_scalar=4,
    global_every=2,
)


@pytest.fixture(scope="session")
def run_of() -> Callable[..., Run]:
    """Makes a job: ``run_of(dp=2, tp=2)``, with settings of training by name."""

    def make(
        *, config: Any = None, optimizer: Any = None, steps: int = 8, **given: Any
    ) -> Run:
        axes = ("dp", "fsdp", "tp", "pp")
        mesh = {axis: given.pop(axis) for axis in axes if axis in given} or {"fsdp": 1}
        training = TrainingConfig(
            **{
                "steps": steps,
                "sequence_length": 8,
                "micro_batch_size": 2,
                "checkpoint_every": 2,
                "sample_length": 0,
                "gradient_accumulation_steps": 4 if "pp" in mesh else 1,
                **given,
            }
        )
        model = ModelConfig(
            name="small",
            mesh_shape=(tuple(mesh.values()), tuple(mesh)),
            config=config or CONFIG,
        )
        settings = Config(
            name="small",
            model=model,
            training=training,
            data=DataConfig(name="synthetic", synthetic=SyntheticConfig(tokens=4000)),
            optimizer=optimizer or AdamWConfig(warmup_steps=2, learning_rate=0.01),
        )
        return Run(settings, mesh_of_shape(model.mesh_shape))

    return make


@pytest.fixture(scope="session")
def filled() -> Callable[[Run], TrainState]:
    """Makes a state of random numbers, in the layout of a job, without a pipeline."""

    def fill(job: Run) -> TrainState:
        draw = np.random.Generator(np.random.PCG64(0))

        def leaf(struct: jax.ShapeDtypeStruct) -> jax.Array:
            values = draw.standard_normal(struct.shape).astype(np.float32)
            if jnp.issubdtype(struct.dtype, jnp.integer):
                values = np.full(struct.shape, 7)
            return jax.device_put(values.astype(struct.dtype), struct.sharding)

        return jax.tree.map(leaf, job.abstract_state)

    return fill


@pytest.fixture(scope="session")
def replaced() -> Callable[..., Run]:
    """A job with other settings of training."""

    def replace(job: Run, **changed: Any) -> Run:
        training = dataclasses.replace(job.config.training, **changed)
        settings = dataclasses.replace(job.config, training=training)
        return Run(settings, job.mesh)

    return replace
