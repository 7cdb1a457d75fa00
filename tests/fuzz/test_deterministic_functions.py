# SPDX-License-Identifier: Apache-2.0
"""Deterministic functions with drawn layouts on drawn meshes: one device's bits."""

from random import Random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import tessera as ts
from tessera.mesh import Mesh
from tests.fuzz.layer_chains import WIDTH, drawn_arrays, drawn_loss


def random_mesh(draw):
    shape = draw.choice([(1,), (2,), (8,), (2, 2), (2, 4), (4, 2), (2, 2, 2)])
    return Mesh(["a", "b", "c"][: len(shape)], range(np.prod(shape)), shape)


def random_spec(draw, mesh, ndim):
    """A layout of a dim of 16 for each, over some axes: of one dim over several too."""
    dims = [[] for _ in range(ndim)]
    for axis in draw.sample(mesh.axes, len(mesh.axes)):
        if draw.random() < 0.7:
            draw.choice(dims).append(axis)
    return PartitionSpec(*(tuple(axes) or None for axes in dims))


def training_step(draw):
    loss = drawn_loss(draw)

    def step(weights, x):
        (value, sums), slope = jax.value_and_grad(loss, has_aux=True)(weights, x)
        return weights - slope / jnp.sqrt(jnp.sum(slope**2)), (value, sums)

    return step


@pytest.mark.full
@pytest.mark.fuzz(sample=3, whole=200)
def test_a_function_has_the_bits_of_one_device(seed, optimized):
    draw, arrays = Random(seed), drawn_arrays(seed, WIDTH)
    step, mesh = training_step(draw), random_mesh(draw)
    layout = PartitionSpec(None, *random_spec(draw, mesh, 2))
    laid_out = ts.function(
        step,
        mesh=mesh,
        in_specs={"weights": layout, "x": random_spec(draw, mesh, 2)},
        out_specs=(layout, (None, random_spec(draw, mesh, 1))),
        numerics="deterministic",
    )
    found = laid_out(*arrays)
    expected = ts.function(step, numerics="deterministic")(*arrays)
    assert np.isfinite(expected[0]).all()
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert found[0].sharding.is_equivalent_to(NamedSharding(mesh.jax, layout), 3)
