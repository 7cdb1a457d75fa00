# SPDX-License-Identifier: Apache-2.0
"""Norms of whole trees and what they are clipped to, against NumPy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tessera as ts
from tessera.errors import OperandError
from tessera.ops.clipping import clip_by_global_norm, global_norm


def test_the_global_norm_is_in_float32_whatever_the_gradients_are():
    tree = {"a": jnp.full((1000,), 3.0, jnp.bfloat16), "b": jnp.full((), 4.0)}
    norm = global_norm(tree)
    assert norm.dtype == jnp.float32
    assert float(norm) == pytest.approx(math.sqrt(9000 + 16), rel=1e-6)
    # Squares of float16 above 255 would be infinite.
    large = {"a": jnp.full((4,), 1000.0, jnp.float16)}
    assert float(global_norm(large)) == 2000.0


def test_the_norm_of_nothing_is_zero():
    assert float(global_norm({})) == 0.0


@given(st.integers(0, 2**31), st.sampled_from([1e-3, 1.0, 1e3]))
def test_clipping_scales_all_gradients_together_and_only_down(seed, scale):
    draw = np.random.default_rng(seed)
    tree = {"a": draw.normal(size=(2, 3)), "b": [draw.normal(size=4)]}
    tree = jax.tree.map(lambda x: x * scale, tree)
    norm = math.sqrt(sum((x**2).sum() for x in jax.tree.leaves(tree)))
    narrow = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)
    clipped, found = clip_by_global_norm(narrow, 1.0)
    assert float(found) == pytest.approx(norm, rel=1e-5)
    for one, other in zip(jax.tree.leaves(clipped), jax.tree.leaves(tree), strict=True):
        np.testing.assert_allclose(one, other * min(1, 1 / norm), rtol=1e-5)


def test_a_limit_may_be_traced():
    @ts.function
    def clipped(x, limit):
        return ts.clip_by_global_norm({"x": x}, limit)

    tree, norm = clipped(jnp.array([3.0, 4.0]), jnp.float32(2.5))
    np.testing.assert_allclose(tree["x"], [1.5, 2.0])
    assert float(norm) == 5.0


def test_clipping_keeps_dtypes_and_spreads_no_nan():
    mixed = {"a": jnp.array([jnp.nan]), "b": jnp.array([4.0], jnp.bfloat16)}
    kept, norm = clip_by_global_norm(mixed, 1.0)
    assert kept["b"].dtype == jnp.bfloat16
    assert float(kept["b"][0]) == 4.0
    assert jnp.isnan(norm)


def test_the_norm_of_arrays_that_are_split_is_that_of_the_whole(dp_mesh):
    place = ts.ShardSpec((0,), ("dp",)).named((8,), dp_mesh)
    x = jax.device_put(jnp.arange(8.0), place)
    assert float(jax.jit(global_norm)({"x": x})) == pytest.approx(math.sqrt(140))


def test_a_limit_that_is_not_positive_is_an_error():
    with pytest.raises(OperandError, match="gradients cannot be clipped to"):
        clip_by_global_norm({"x": jnp.ones(2)}, 0.0)
