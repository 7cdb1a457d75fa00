# SPDX-License-Identifier: Apache-2.0
"""layer_norm and rms_norm against NumPy in f64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.test_util import check_grads

from tessera.errors import OperandError
from tessera.ops.norms import layer_norm, rms_norm

DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(2, 3, 8), loc=1.0, scale=3.0)
WEIGHT, BIAS = DRAW.normal(size=8), DRAW.normal(size=8)


def layer_norm_f64(x, weight=1.0, bias=0.0, dim=-1, eps=1e-5):
    centered = x - x.mean(dim, keepdims=True)
    return centered / np.sqrt(x.var(dim, keepdims=True) + eps) * weight + bias


def rms_norm_f64(x, weight=1.0, dim=-1, eps=1e-6):
    return x / np.sqrt((x**2).mean(dim, keepdims=True) + eps) * weight


def narrow(*arrays, dtype=jnp.float32):
    return [jnp.asarray(array, dtype) for array in arrays]


@given(
    st.integers(0, 2**31),
    st.sampled_from([(4,), (3, 4), (2, 3, 4)]),
    st.sampled_from([1e-2, 1.0, 1e3]),
)
def test_they_equal_the_formula(seed, shape, scale):
    x = np.random.default_rng(seed).normal(size=shape, scale=scale)
    found = layer_norm(*narrow(x, WEIGHT[:4], BIAS[:4]))
    np.testing.assert_allclose(
        found, layer_norm_f64(x, WEIGHT[:4], BIAS[:4]), rtol=2e-5, atol=2e-5
    )
    found = rms_norm(*narrow(x, WEIGHT[:4]))
    np.testing.assert_allclose(found, rms_norm_f64(x, WEIGHT[:4]), rtol=2e-5)


def test_several_dims_are_normalized_together_in_any_order():
    weight = DRAW.normal(size=(2, 8))
    found = layer_norm(*narrow(X, weight), dim=(2, 0))
    expected = layer_norm_f64(X, weight[:, None], dim=(0, 2))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        rms_norm(*narrow(X), dim=[0, -1]), rms_norm_f64(X, dim=(0, 2)), rtol=1e-5
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_statistics_are_f32_where_the_operand_is_narrow(dtype):
    """As exact as rounding the result once: sums in the dtype would be far off."""
    x, weight, bias = narrow(DRAW.normal(size=(4, 4096)) + 8, dtype=dtype), None, None
    (x,) = x
    for found, reference in (
        (layer_norm(x, weight, bias), layer_norm_f64),
        (rms_norm(x, weight), rms_norm_f64),
    ):
        assert found.dtype == dtype
        expected = reference(np.asarray(x, np.float64))
        tolerance = float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(
            np.asarray(found, np.float64), expected, rtol=tolerance, atol=1e-5
        )


def test_a_narrow_operand_may_have_f32_weights():
    (x,) = narrow(X, dtype=jnp.bfloat16)
    assert layer_norm(x, *narrow(WEIGHT, BIAS)).dtype == jnp.bfloat16
    assert rms_norm(x, *narrow(WEIGHT)).dtype == jnp.bfloat16


def test_f64_stays_f64():
    with jax.enable_x64(True):
        x = jnp.asarray(X)
        np.testing.assert_allclose(layer_norm(x), layer_norm_f64(X), rtol=1e-12)
        np.testing.assert_allclose(rms_norm(x), rms_norm_f64(X), rtol=1e-12)


@pytest.mark.slow(reason="it compiles several programs")
def test_gradients_equal_finite_differences():
    x, weight, bias = narrow(X[0, :2], WEIGHT, BIAS)
    check_grads(layer_norm, (x, weight, bias), 1, ["rev"], rtol=2e-2)
    check_grads(rms_norm, (x, weight), 1, ["rev"], rtol=2e-2)


def test_a_weight_of_another_size_is_an_error_that_shows_the_sizes():
    with pytest.raises(OperandError) as caught:
        layer_norm(jnp.ones((2, 8)), jnp.ones(2))
    assert str(caught.value) == (
        "[T401] the weight of layer_norm does not have the sizes of the normalized "
        "dims\n"
        "  got: weight (2,), x (2, 8), dims (1,) of sizes (8,)\n"
        "  fix: pass a weight of shape (8,), or other dims as dim=\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T401.html"
    )


@pytest.mark.parametrize("dim", [2, -3, (0, 0), (0, -2), ()])
def test_dims_that_there_are_not_are_an_error(dim):
    with pytest.raises(OperandError, match="does not have these dims"):
        rms_norm(jnp.ones((2, 8)), dim=dim)


def test_integers_are_an_error():
    with pytest.raises(OperandError, match="dtype int32, shape"):
        rms_norm(jnp.arange(8))
