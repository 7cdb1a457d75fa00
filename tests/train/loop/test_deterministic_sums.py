# SPDX-License-Identifier: Apache-2.0
"""Sums in one tree: the same bits however the tree is shared out."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tessera.mesh import Mesh
from tessera.train.loop.deterministic_sums import (
    optimization_barrier,
    pairwise_sum,
    sum_of_rounds,
    sum_over_devices,
)

# Far from each other in size, so that every order of a sum rounds otherwise.
VALUES = np.float32(10.0) ** np.random.default_rng(0).uniform(-4, 4, (8, 64)).astype(
    np.float32
)


def tree(values):
    """By hand: neighbors, then neighbors of pairs."""
    while len(values) > 1:
        values = values[0::2] + values[1::2]
    return values[0]


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_the_tree_is_one_however_many_devices_share_it(devices):
    mesh = Mesh(["dp"], devices=range(devices))
    own = 8 // devices

    def total(rows):
        return sum_over_devices(
            pairwise_sum(lambda row: rows[row], own), ("dp",), devices
        )

    region = jax.shard_map(
        total, mesh=mesh.jax, in_specs=P("dp"), out_specs=P(), check_vma=False
    )
    np.testing.assert_array_equal(jax.jit(region)(VALUES), tree(VALUES))


@pytest.mark.parametrize("sizes", [(3,), (5,), (7,), (3, 2)])
def test_devices_that_cannot_share_the_tree_evenly_add_in_the_same_tree(sizes):
    axes = ("dp", "tp")[: len(sizes)]
    devices = math.prod(sizes)
    mesh = Mesh(axes, devices=range(devices), shape=sizes)

    def total(rows):
        # Shapes that no number of devices divides, and one without dims.
        rows = {"row": rows, "scalar": rows[:, 0], "matrix": rows.reshape(8, 4, 16)}
        return sum_of_rounds(
            lambda row: {name: array[row] for name, array in rows.items()},
            *(8, axes, devices),
        )

    region = jax.shard_map(
        total, mesh=mesh.jax, in_specs=P(), out_specs=P(), check_vma=False
    )
    found = jax.jit(region)(VALUES)
    np.testing.assert_array_equal(found["row"], tree(VALUES))
    np.testing.assert_array_equal(found["scalar"], tree(VALUES)[0])
    np.testing.assert_array_equal(found["matrix"], tree(VALUES).reshape(4, 16))


@pytest.mark.parametrize("axes", [("dp", "fsdp"), ("fsdp", "dp")])
def test_devices_along_two_axes_are_counted_outer_first(axes):
    mesh = Mesh(["dp", "fsdp"], devices=range(8), shape=(2, 4))

    def total(rows):
        return sum_over_devices(rows[0], axes, 8)

    region = jax.shard_map(
        total, mesh=mesh.jax, in_specs=P(axes), out_specs=P(), check_vma=False
    )
    np.testing.assert_array_equal(jax.jit(region)(VALUES), tree(VALUES))


def test_another_order_would_be_another_sum():
    left = VALUES[0]
    for row in VALUES[1:]:
        left = left + row
    assert (left != tree(VALUES)).any()


def test_negative_zeros_stay_negative():
    zeros = jnp.full((4, 2), -0.0)
    assert np.signbit(pairwise_sum(lambda row: zeros[row], 4)).all()


def test_what_is_sealed_is_a_branch_of_the_compiled_program():
    def step(x):
        return optimization_barrier(lambda x: x * 3.0 + 1.0, x * 2.0) * 5.0

    x = jnp.arange(4.0)
    assert "conditional(" in jax.jit(step).lower(x).compile().as_text()
    np.testing.assert_array_equal(jax.jit(step)(x), (x * 6.0 + 1.0) * 5.0)
