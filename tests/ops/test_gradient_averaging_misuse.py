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
from tessera.errors import CollectiveError, NoMeshError
from tessera.mesh import Mesh

DP = Mesh(["dp"], devices=range(8))


def averaging(compression, **options):
    identity = optax.identity()
    return dist.average_gradients(identity, compression=compression, **options)


def in_kernel(body, value=None):
    value = np.ones((8, 4), np.float32) if value is None else value
    return op.kernel(body)(jax.device_put(value, NamedSharding(DP.jax, P("dp"))))


def test_gradients_that_jax_has_summed_already_are_refused():
    transform = averaging("none")

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
    transform = averaging("none")
    with DP, pytest.raises(CollectiveError, match="outside an SPMD region"):
        transform.update(jnp.ones(4), transform.init(jnp.ones(4)))


def test_integers_are_refused():
    transform = averaging("none")
    with pytest.raises(CollectiveError, match="floating"):
        in_kernel(
            lambda x: transform.update(x, transform.init(x))[0],
            np.ones((8, 4), np.int32),
        )


def test_a_residual_of_another_shape_is_refused():
    transform = averaging("top_k")
    with DP:
        state = transform.init(jnp.zeros((2, 4), jnp.float32))

    @op.kernel
    def body(x, state):
        return transform.update(x, state)

    x = jax.device_put(np.ones((8, 4), np.float32), NamedSharding(DP.jax, P("dp")))
    with pytest.raises(
        CollectiveError, match=r"residual \(1, 2, 4\), gradient \(1, 4\)"
    ):
        body(x, state)


@pytest.mark.parametrize(
    ("compression", "ratio", "words"),
    [
        ("int8", 0.1, "Known: 'none', 'top_k'"),
        ("top_k", 0.0, "above 0"),
        ("top_k", 1.5, "at most 1"),
    ],
)
def test_compressions_that_do_not_exist(compression, ratio, words):
    with pytest.raises(CollectiveError, match=words):
        averaging(compression, ratio=ratio)


def test_a_residual_needs_a_mesh():
    with pytest.raises(NoMeshError):
        averaging("top_k").init(jnp.zeros(3))
