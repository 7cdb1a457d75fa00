# SPDX-License-Identifier: Apache-2.0
"""Compares the states of two loops."""

import math

import jax
import jax.numpy as jnp
import numpy as np


def equal(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert type(a) is type(b)
        if hasattr(a, "dtype"):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
                a, b = map(jax.random.key_data, (a, b))
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
        else:
            assert a == b or (math.isnan(a) and math.isnan(b))
