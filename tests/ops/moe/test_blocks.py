# SPDX-License-Identifier: Apache-2.0
"""Experts in blocks, as on a GPU, against one matmul for each expert's rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tessera.ops.moe.blocks import BLOCK, TURN, in_blocks

D, H, F, E = 4, 6, 3, 5
ROWS = BLOCK * TURN + 300


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("f4")


def experts(rows_ECD, weights):
    """Two matmuls with something between them."""
    up, down = weights
    return jnp.tanh(rows_ECD @ up) @ down


def by_expert(rows, sizes, weights):
    """The same, one expert after the other, and zeros."""
    ends = np.cumsum(sizes)
    groups = [
        experts(rows[None, end - size : end], [w[e][None] for w in weights])[0]
        for e, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]
    return jnp.concatenate([*groups, jnp.zeros((len(rows) - ends[-1], F))])


@pytest.fixture(scope="module")
def computed():
    """Results and gradients of ``in_blocks``, one program for each share."""

    def with_gradients(share, rows, order, sizes, weights, cotangent):
        def function(rows, weights):
            return in_blocks(experts, share, rows, order, sizes, weights)

        out, back = jax.vjp(function, rows, weights)
        return out, back(cotangent)

    return jax.jit(with_gradients, static_argnums=0)


@pytest.mark.slow(reason="compiles both passes for each share")
@pytest.mark.parametrize("share", [0, 20, ROWS // E, 2 * ROWS])
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param([ROWS // E] * E, id="even"),
        pytest.param([0, 0, ROWS, 0, 0], id="one has all"),
        pytest.param([1, 0, BLOCK, BLOCK + 1, 900], id="all kinds"),
        pytest.param([0] * E, id="none"),
    ],
)
def test_each_row_meets_its_own_expert_whatever_their_sizes(computed, share, sizes):
    rows, cotangent = random(ROWS, D), random(ROWS, F, seed=1)
    weights = [random(E, D, H, seed=2), random(E, H, F, seed=3)]
    order = np.random.default_rng(4).permutation(ROWS).astype("i4")

    def by_order(rows, weights):
        out = by_expert(rows[order], sizes, weights)
        return jnp.zeros_like(out).at[order].set(out)

    want, back = jax.vjp(by_order, rows, weights)
    got = computed(share, rows, order, np.array(sizes, "i4"), weights, cotangent)
    for a, b in zip(*map(jax.tree.leaves, (got, (want, back(cotangent)))), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(1, np.abs(b).max()))


def test_gradients_of_weights_are_added_up_in_f32():
    """Ones of as many blocks as bf16 cannot count."""
    rows = jnp.ones((300 * BLOCK, 1), jnp.bfloat16)
    order, sizes = jnp.arange(len(rows)), jnp.array([len(rows)])

    def total(weight):
        return in_blocks(jnp.matmul, 0, rows, order, sizes, weight).astype("f4").sum()

    gradient = jax.jit(jax.grad(total))(jnp.ones((1, 1, 1), jnp.bfloat16))
    assert gradient.item() == 300 * BLOCK
