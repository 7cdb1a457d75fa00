# SPDX-License-Identifier: Apache-2.0
"""The parts of deterministic steps on drawn meshes, optimized: one device's bits."""

from random import Random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import tessera as ts
from tessera.train.config.optimizer_config import AdamWConfig
from tessera.train.loop.deterministic_numerics import FixedOrder
from tessera.train.loop.optimizers import make_optimizer
from tests.fuzz.layer_chains import drawn_arrays, drawn_loss
from tests.fuzz.test_deterministic_steps import DEVICES, random_mesh
from tests.train.loop.test_deterministic_numerics import mesh_of

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("optimized")]


class Stored:
    """A model of which only parameters matter here."""

    def plain(self, params):
        return params


@pytest.mark.fuzz(sample=3, whole=200)
def test_the_sums_of_any_loss_have_the_bits_of_one_device(seed):
    draw, arrays = Random(seed), drawn_arrays(seed, 64)
    loss, name = drawn_loss(draw), random_mesh(draw)
    differentiated = jax.value_and_grad(loss, has_aux=True)

    def sums(name):
        order = FixedOrder(mesh_of(name), Stored(), PartitionSpec(), DEVICES)

        @ts.function(mesh=order.mesh)
        def step(weights, x):
            def of(weights, batch):
                return differentiated(weights, batch["x"])

            return order.summed(of, weights, {"x": x[None]})

        return step(*arrays)

    expected = sums("dp1")
    assert np.isfinite(expected[1]).all()
    jax.tree.map(np.testing.assert_array_equal, sums(name), expected)


@pytest.mark.fuzz(sample=3, whole=200)
def test_an_update_of_blocks_of_any_shape_has_the_bits_of_one_device(seed):
    draw, rng = Random(seed), np.random.default_rng(seed)
    name, rows = random_mesh(draw), 8 * draw.randint(1, 5)
    shape = (rows, draw.randint(1, 40))
    optimizer, _ = make_optimizer(
        AdamWConfig(weight_decay=0.1), steps=20, clip_norm=0.5
    )
    arrays = [jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(4)]
    state = optimizer.init({"w": arrays[0]})
    moments = iter(arrays[2:])
    state = jax.tree.map(
        lambda leaf: next(moments) ** 2 if leaf.shape == shape else leaf + 3, state
    )

    def updated(name):
        mesh = mesh_of(name)
        block = PartitionSpec(tuple(mesh.axes) or None)
        layouts = {"w": block}
        order = FixedOrder(mesh, Stored(), layouts, DEVICES)
        states = jax.tree.map(
            lambda leaf: block if leaf.shape == shape else PartitionSpec(), state
        )
        update = optax.with_extra_args_support(optimizer).update

        @ts.function(mesh=mesh, in_specs={"params": layouts, "state": states})
        def step(gradients, state, params, norm):
            update_blocks = order.by_element(update, layouts, states)
            return update_blocks(gradients, state, params, norm=norm)

        return step({"w": arrays[1]}, state, {"w": arrays[0]}, jnp.float32(0.7))

    jax.tree.map(np.testing.assert_array_equal, updated(name), updated("dp1"))
