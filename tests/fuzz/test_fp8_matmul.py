# SPDX-License-Identifier: Apache-2.0
"""Matmuls of 8-bit operands: random shapes, ranges and layouts against NumPy."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tessera.mesh import Mesh
from tests.train.models.decoder.test_fp8_matmul import computed, expected, operands


def drawn(rng):
    """Operands and the number of contracted dims."""
    rows, contracted, outputs = (
        tuple(int(size) for size in rng.choice([1, 3, 8, 16], rng.integers(1, 3)))
        for _ in range(3)
    )
    scales = 10.0 ** rng.uniform([-3, -3, -8], [4, 4, 4])
    given = operands(rng, rows, contracted, outputs, scales)
    number = int(rng.integers(4))
    if number < 3:  # some elements, or all of them
        share = rng.choice([0.5, 1.0])
        given[number] = jax.numpy.where(
            rng.random(given[number].shape) > share, given[number], 0.0
        )
    return given, len(contracted)


def layout(rng, shape):
    """A spec that shards some dims which two devices divide, each over its axis."""
    axes = ["a", "b", "c"]
    rng.shuffle(axes)
    return PartitionSpec(
        *(
            axes.pop() if axes and n % 2 == 0 and rng.random() < 0.5 else None
            for n in shape
        )
    )


@pytest.mark.fuzz(sample=15, whole=500)
def test_random_products_are_those_of_numpy_on_any_layout(seed):
    rng = np.random.default_rng(seed)
    given, axes = drawn(rng)
    mesh = Mesh(["a", "b", "c"], shape=(2, 2, 2)).jax
    placed = [
        jax.device_put(x, NamedSharding(mesh, layout(rng, x.shape))) for x in given
    ]
    for results in computed(*given, axes), computed(*placed, axes):
        for got, want in zip(results, expected(*given, axes), strict=True):
            scale = np.abs(want).max()
            np.testing.assert_allclose(got, want, 1e-5, 1e-5 * scale)
