# SPDX-License-Identifier: Apache-2.0
"""Functions of cast parameters whose gradients are added up in f32."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tessera.ops.wide_gradients import with_wide_gradient

TABLE = jax.random.normal(jax.random.key(0), (5, 3))
# One row a thousand times: in bf16, adding 1 to 256 gives 256.
NUMBERS = jnp.zeros(1000, jnp.int32)


def rows(table, numbers, *, dtype=None):
    return (table if dtype is None else table.astype(dtype))[numbers]


def total(table, numbers):
    narrow = partial(rows, dtype=jnp.bfloat16)
    return with_wide_gradient(narrow, rows, table, numbers).sum(dtype=jnp.float32)


def test_the_value_is_that_of_the_cast_parameter():
    out = with_wide_gradient(partial(rows, dtype=jnp.bfloat16), rows, TABLE, NUMBERS)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out[0], TABLE[0].astype(jnp.bfloat16))


def test_a_thousand_gradients_of_one_row_are_added_up():
    gradient = jax.grad(total)(TABLE, NUMBERS)
    expected = jnp.zeros_like(TABLE).at[0].set(1000.0)
    np.testing.assert_array_equal(gradient, expected)


def test_a_parameter_that_is_narrow_has_a_narrow_gradient_of_the_same_sum():
    gradient = jax.grad(total)(TABLE.astype(jnp.bfloat16), NUMBERS)
    assert gradient.dtype == jnp.bfloat16
    assert float(gradient[0, 0]) == 1000.0


@pytest.mark.parametrize("transform", [jax.jit, jax.checkpoint, lambda f: f])
def test_it_can_be_transformed(transform):
    gradient = jax.grad(transform(total))(TABLE, NUMBERS)
    assert float(gradient[0, 0]) == 1000.0
