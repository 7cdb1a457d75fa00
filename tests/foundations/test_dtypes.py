# SPDX-License-Identifier: Apache-2.0
"""Dtypes by name: one table, NumPy's own objects."""

import jax.numpy as jnp
import numpy as np
import pytest

import tessera as ts
from tessera.foundations.dtypes import DTYPES, as_dtype, short_name


@pytest.mark.parametrize("name", sorted(set(DTYPES) - {"bool"}))
def test_a_name_is_a_dtype_of_the_facade_and_a_string_for_it(name):
    assert getattr(ts, name) is DTYPES[name] is as_dtype(name)


def test_short_and_long_names_are_the_same_dtypes():
    pairs = [
        (ts.f32, ts.float32, jnp.float32),
        (ts.bf16, ts.bfloat16, jnp.bfloat16),
        (ts.f8_e4m3, ts.float8_e4m3fn, jnp.float8_e4m3fn),
        (ts.i32, ts.int32, jnp.int32),
        (ts.u8, ts.uint8, jnp.uint8),
        (ts.bool_, ts.bool_, jnp.bool_),
    ]
    for short, long, scalar in pairs:
        assert short is long
        assert short == scalar
        assert scalar == short


@pytest.mark.parametrize("dtype", [ts.f32, ts.bf16, ts.f16, ts.f8_e5m2, ts.i8])
def test_a_dtype_is_that_of_the_arrays_made_with_it(dtype):
    arrays = [
        jnp.ones(2).astype(dtype),
        jnp.zeros((2,), dtype),
        jnp.full((2,), 3, dtype=dtype),
        np.zeros(2, dtype),
        ts.dist.tensor((2,), dtype=dtype),
    ]
    for array in arrays:
        assert array.dtype == dtype
        assert {dtype: "found"}[array.dtype] == "found"


def test_jax_asks_them_what_it_asks_its_own():
    assert jnp.issubdtype(ts.bf16, jnp.floating)
    assert jnp.finfo(ts.f32).max == jnp.finfo(jnp.float32).max
    assert jnp.promote_types(ts.bf16, ts.bf16) == ts.bf16


def test_messages_have_short_names():
    names = [short_name(d) for d in (jnp.bfloat16, "int32", ts.bool_, "complex64")]
    assert names == ["bf16", "i32", "bool", "complex64"]
