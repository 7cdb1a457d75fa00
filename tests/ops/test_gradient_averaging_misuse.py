# SPDX-License-Identifier: Apache-2.0
"""Gradients that cannot be averaged are refused with a coded error."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tessera import dist, op
from tessera.errors import CollectiveError
from tessera.mesh import Mesh

DP = Mesh(["dp"], devices=range(8))


def averaging():
    return dist.average_gradients(optax.identity())


def in_kernel(body, value=None):
    value = np.ones((8, 4), np.float32) if value is None else value
    return op.kernel(body)(jax.device_put(value, NamedSharding(DP.jax, P("dp"))))


def test_gradients_that_jax_has_summed_already_are_refused():
    transform = averaging()

    def body(x):
        gradients = jax.grad(lambda w: (w * x).sum())(jnp.ones(4, jnp.float32))
        return transform.update(gradients, transform.init(gradients))[0]

    with pytest.raises(CollectiveError) as caught:
        in_kernel(body)
    assert str(caught.value) == (
        "[T206] these gradients are summed over 'dp' already\n"
        "  got: float32[4], the same on every device\n"
        "  fix: differentiate by each device's own parameters: own = "
        "dist.per_device(params, axis='dp')\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T206.html"
    )


def test_gradients_outside_a_region_are_refused():
    transform = averaging()
    with DP, pytest.raises(CollectiveError, match="outside an SPMD region"):
        transform.update(jnp.ones(4), transform.init(jnp.ones(4)))


def test_integers_are_refused():
    transform = averaging()
    with pytest.raises(CollectiveError, match="floating"):
        in_kernel(
            lambda x: transform.update(x, transform.init(x))[0],
            np.ones((8, 4), np.int32),
        )
