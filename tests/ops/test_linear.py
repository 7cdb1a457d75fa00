# SPDX-License-Identifier: Apache-2.0
"""linear against NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from tessera.errors import OperandError
from tessera.ops.linear import linear

DRAW = np.random.default_rng(0)
X, WEIGHT, BIAS = (DRAW.normal(size=s).astype("f4") for s in ((2, 3, 4), (4, 5), (5,)))


def test_it_is_a_product_and_a_sum():
    np.testing.assert_allclose(linear(X, WEIGHT), X @ WEIGHT, rtol=1e-5)
    np.testing.assert_allclose(linear(X, WEIGHT, BIAS), X @ WEIGHT + BIAS, rtol=1e-5)
    np.testing.assert_allclose(linear(X[0, 0], WEIGHT), X[0, 0] @ WEIGHT, rtol=1e-5)


def test_the_dtype_is_that_of_the_operands():
    narrow = [jnp.asarray(x, jnp.bfloat16) for x in (X, WEIGHT, BIAS)]
    assert linear(*narrow).dtype == jnp.bfloat16


def test_a_weight_the_other_way_round_is_an_error_with_both_shapes():
    with pytest.raises(OperandError, match=r"shapes \(2, 3, 4\) and \(5, 4\)"):
        linear(X, WEIGHT.T)


def test_a_bias_of_another_size_is_an_error():
    with pytest.raises(OperandError) as caught:
        linear(X, WEIGHT, X[0, 0])
    assert str(caught.value) == (
        "[T401] linear takes a weight [D_in, D_out] and a bias [D_out]\n"
        "  got: weight (4, 5), bias (4,)\n"
        "  fix: transpose a weight that comes from PyTorch\n"
        "  docs: docs/errors/T401.md"
    )
