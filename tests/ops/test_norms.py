# SPDX-License-Identifier: Apache-2.0
"""rms_norm against NumPy in f64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.test_util import check_grads

from tessera.errors import OperandError
from tessera.ops.norms import rms_norm

DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(2, 3, 8), loc=1.0, scale=3.0)
WEIGHT = DRAW.normal(size=8)


def rms_norm_f64(x, weight=1.0, eps=1e-6):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def narrow(*arrays, dtype=jnp.float32):
    return [jnp.asarray(array, dtype) for array in arrays]


@given(
    st.integers(0, 2**31),
    st.sampled_from([(4,), (3, 4), (2, 3, 4)]),
    st.sampled_from([1e-2, 1.0, 1e3]),
)
def test_it_equals_the_formula(seed, shape, scale):
    x = np.random.default_rng(seed).normal(size=shape, scale=scale)
    found = rms_norm(*narrow(x, WEIGHT[:4]))
    np.testing.assert_allclose(found, rms_norm_f64(x, WEIGHT[:4]), rtol=2e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_statistics_are_f32_where_the_operand_is_narrow(dtype):
    """As exact as rounding the result once: sums in the dtype would be far off."""
    (x,) = narrow(DRAW.normal(size=(4, 4096)) + 8, dtype=dtype)
    found = rms_norm(x)
    assert found.dtype == dtype
    expected = rms_norm_f64(np.asarray(x, np.float64))
    tolerance = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(
        np.asarray(found, np.float64), expected, rtol=tolerance, atol=1e-5
    )


def test_a_narrow_operand_may_have_f32_weights():
    (x,) = narrow(X, dtype=jnp.bfloat16)
    assert rms_norm(x, *narrow(WEIGHT)).dtype == jnp.bfloat16


def test_f64_stays_f64():
    with jax.enable_x64(True):
        x = jnp.asarray(X)
        np.testing.assert_allclose(rms_norm(x), rms_norm_f64(X), rtol=1e-12)


@pytest.mark.slow(reason="it compiles several programs")
def test_gradients_equal_finite_differences():
    x, weight = narrow(X[0, :2], WEIGHT)
    check_grads(rms_norm, (x, weight), 1, ["rev"], rtol=2e-2)


def test_a_weight_of_another_size_is_an_error_that_shows_the_sizes():
    with pytest.raises(OperandError) as caught:
        rms_norm(jnp.ones((2, 8)), jnp.ones(2))
    assert str(caught.value) == (
        "[T401] the weight of rms_norm does not have the size of the last dim\n"
        "  got: weight (2,), x (2, 8)\n"
        "  fix: pass a weight of shape (8,)\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T401.html"
    )


def test_a_scalar_is_an_error():
    with pytest.raises(OperandError, match="does not have this dim"):
        rms_norm(jnp.ones(()))


def test_integers_are_an_error():
    with pytest.raises(OperandError, match="dtype int32, shape"):
        rms_norm(jnp.arange(8))
