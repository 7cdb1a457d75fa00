# SPDX-License-Identifier: Apache-2.0
"""Dropout: what it keeps, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tessera.errors import OperandError
from tessera.ops.activations import dropout

X = np.random.default_rng(0).normal(size=(3, 4, 5), scale=4.0)
KEY = jax.random.key(3)


def test_dropout_keeps_the_mean_and_drops_its_part():
    found = dropout(jnp.ones((200, 200)), 0.3, key=KEY)
    assert float((found == 0).mean()) == pytest.approx(0.3, abs=0.01)
    assert float(found.mean()) == pytest.approx(1.0, abs=0.02)
    np.testing.assert_allclose(found[found != 0], 1 / 0.7, rtol=1e-6)


def test_a_key_gives_the_same_zeros_and_another_one_others():
    x = jnp.ones((64, 64))
    first = dropout(x, 0.5, key=KEY)
    assert (first == dropout(x, 0.5, key=KEY)).all()
    assert (first != dropout(x, 0.5, key=jax.random.key(4))).any()


def test_nothing_is_dropped_at_rate_zero_or_deterministically_and_no_key_is_needed():
    x = jnp.asarray(X, jnp.bfloat16)
    for found in (dropout(x, 0.0), dropout(x, 0.5, deterministic=True)):
        assert found.dtype == jnp.bfloat16
        assert (found == x).all()


def test_everything_is_dropped_at_rate_one():
    assert not dropout(jnp.ones(8), 1.0, key=KEY).any()


def test_the_gradient_passes_where_nothing_was_dropped():
    x = jnp.ones(64)
    kept = dropout(x, 0.25, key=KEY)
    gradient = jax.grad(lambda x: dropout(x, 0.25, key=KEY).sum())(x)
    np.testing.assert_array_equal(gradient, kept)


def test_the_zeros_do_not_depend_on_the_mesh(grid_mesh):
    x = jnp.ones((8, 16))
    alone = dropout(x, 0.5, key=KEY)
    split = jax.device_put(x, NamedSharding(grid_mesh.jax, P("dp", "tp")))
    dropped = jax.jit(lambda x: dropout(x, 0.5, key=KEY))(split)
    np.testing.assert_array_equal(dropped, alone)


def test_a_missing_key_and_a_rate_that_is_none_are_errors():
    with pytest.raises(OperandError) as caught:
        dropout(jnp.ones(8), 0.5)
    assert str(caught.value) == (
        "[T401] dropout needs a key\n"
        "  got: rate 0.5, key=None\n"
        "  fix: pass key=jax.random.fold_in(key, step), or deterministic=True\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T401.html"
    )
    with pytest.raises(OperandError, match="rate 50"):
        dropout(jnp.ones(8), 50, key=KEY)
