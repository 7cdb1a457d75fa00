# SPDX-License-Identifier: Apache-2.0
"""Matmuls of 8-bit operands against NumPy with the dtypes of ml_dtypes."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tessera.train.models.decoder.fp8_matmul import fp8_tensordot, quantize

DTYPES = [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
E4M3, E5M2 = DTYPES


def quantized(x, dtype):
    """The numbers that an array is rounded to before they are scaled, and the scale."""
    x, most = np.asarray(x, np.float32), np.float32(ml_dtypes.finfo(dtype).max)
    scale = np.maximum(np.abs(x).max() / most, np.finfo(np.float32).tiny)
    return (x / scale).astype(dtype).astype(np.float32), scale


def expected(x, weight, gradient, axes):
    """The result and both gradients in f32."""
    (x, sx), (w, sw) = quantized(x, E4M3), quantized(weight, E4M3)
    g, sg = quantized(gradient, E5M2)
    outputs = range(-(w.ndim - axes), 0), range(axes, w.ndim)
    rows = range(x.ndim - axes)
    return (
        np.tensordot(x, w, axes) * (sx * sw),
        np.tensordot(g, w, [[*dims] for dims in outputs]) * (sg * sw),
        np.tensordot(x, g, [[*rows], [*rows]]) * (sx * sg),
    )


@jax.jit(static_argnums=3)
def computed(x, weight, gradient, axes):
    result, transpose = jax.vjp(lambda x, w: fp8_tensordot(x, w, axes), x, weight)
    return (result, *transpose(gradient))


def operands(seed, rows, contracted, outputs, scales=(1.0, 1.0, 1.0), dtype="float32"):
    draw = np.random.default_rng(seed)
    shapes = (*rows, *contracted), (*contracted, *outputs), (*rows, *outputs)
    return [
        jnp.asarray(scale * draw.normal(size=shape), dtype)
        for scale, shape in zip(scales, shapes, strict=True)
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-28, 1e-3, 1.0, 1e4, 1e37])
def test_arrays_are_rounded_as_numpy_rounds_them(dtype, scale):
    x = (scale * np.random.default_rng(0).normal(size=(64, 64))).astype(np.float32)
    values, got = jax.jit(quantize, static_argnums=1)(x, dtype)
    want, want_scale = quantized(x, dtype)
    np.testing.assert_allclose(got, want_scale, rtol=2**-23)
    np.testing.assert_array_equal(np.asarray(values, np.float32), want)
    assert np.abs(want).max() == ml_dtypes.finfo(dtype).max


@pytest.mark.parametrize("scales", [(1e-3, 1e4, 1.0), (1.0, 1.0, 1e-8), (1e4, 1, 1e4)])
@pytest.mark.parametrize("shapes", [((2, 24), (32,), (4, 8)), ((48,), (4, 8), (32,))])
def test_products_are_those_of_numpy(shapes, scales):
    given, axes = operands(0, *shapes, scales), len(shapes[1])
    for got, want in zip(computed(*given, axes), expected(*given, axes), strict=True):
        assert (got.dtype, got.shape) == (np.float32, want.shape)
        np.testing.assert_allclose(got, want, 1e-5, 1e-6 * np.abs(want).max())


def test_results_have_the_dtype_of_the_operands():
    given = operands(1, (64,), (32,), (16,), dtype="bfloat16")
    for got, want in zip(computed(*given, 1), expected(*given, 1), strict=True):
        assert got.dtype == jnp.bfloat16
        # The sum and the scaled sum are both rounded, to 8 bits.
        np.testing.assert_allclose(
            np.asarray(got, np.float32), want, 2**-7, 1e-5 * np.abs(want).max()
        )


@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 1, 2)])
def test_zeros_give_zeros(which):
    given = operands(2, (16,), (16,), (16,))
    given = [jnp.zeros_like(x) if n in which else x for n, x in enumerate(given)]
    for got, want in zip(computed(*given, 1), expected(*given, 1), strict=True):
        assert np.isfinite(got).all()
        assert bool(got.any()) == bool(want.any())


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", range(3))
def test_a_number_that_is_not_finite_makes_every_product_nan(which, bad):
    given = operands(3, (16,), (16,), (16,))
    given[which] = given[which].at[3, 5].set(bad)
    results = computed(*given, 1)
    # Result and gradients, by the operands that they are products of.
    for operands_of, got in zip(((0, 1), (2, 1), (0, 2)), results, strict=True):
        assert np.isnan(got).all() == (which in operands_of)
        assert np.isfinite(got).all() == (which not in operands_of)


def test_a_maximum_at_the_edge_of_rounding_does_not_overflow():
    x = jnp.float32(1 + 2.0**-9) * jnp.ones(4)  # its quotient may be above 448
    for dtype in DTYPES:
        for value in np.geomspace(1e-30, 1e30, 200, dtype=np.float32):
            values, _ = quantize(value * x, dtype)
            assert (np.asarray(values) == ml_dtypes.finfo(dtype).max).all()
