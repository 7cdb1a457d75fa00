# SPDX-License-Identifier: Apache-2.0
"""The planner's walk through a program agrees with the count of its operations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tessera.analysis.flops import count
from tessera.train.planner.matmuls import Weight
from tessera.train.planner.traced_matmuls import find_products

SIZES = (1, 2, 3, 4)


def program(rng: np.random.Generator, depth: int):
    """A function of a stack of weights and an array ``[rows, width]``."""
    kind = rng.choice(["matmul", "gram", "scan", "jit", "remat", "chain", "branch"])
    if depth == 0 or kind == "matmul":
        is_transposed = bool(rng.integers(2))
        return lambda w, x: jnp.tanh(x @ (w.T if is_transposed else w))
    inner = program(rng, depth - 1)
    if kind == "gram":
        return lambda w, x: inner(w, (x @ x.T) @ x)
    if kind == "scan":
        length = int(rng.choice(SIZES))

        def looped(w, x):
            return jax.lax.scan(lambda x, _: (inner(w, x), None), x, length=length)[0]

        return looped
    if kind == "jit":
        return jax.jit(inner)
    if kind == "remat":
        return jax.checkpoint(inner)
    other = program(rng, depth - 1)
    if kind == "chain":
        return lambda w, x: other(w, inner(w, x))
    taken = rng.integers(0, 2, int(rng.choice(SIZES)))

    def branched(w, x):
        def body(x, index):
            return jax.lax.switch(index, [lambda: inner(w, x), lambda: inner(w, x)]), 0

        return jax.lax.scan(body, x, jnp.asarray(taken))[0]

    return branched


@pytest.mark.fuzz(sample=40, whole=2000)
def test_matmuls_of_random_programs_are_all_found(seed):
    """All matmuls are with the weight or between activations, forward and backward."""
    rng = np.random.default_rng(seed)
    rows, width = (int(each) for each in rng.choice(SIZES, 2))
    function = program(rng, int(rng.integers(1, 5)))
    w, x = jnp.ones((width, width)), jnp.ones((rows, width))
    forward = jax.make_jaxpr(function)(w, x)
    found = find_products(forward, [Weight("w", ("embed", "mlp")), None])
    products = sum(product.flops for product in found.products)
    assert products + found.inner_flops == found.total_flops
    assert found.total_flops == count(forward).matmul
    assert all(product.path == "w" for product in found.products)
    backward = jax.make_jaxpr(jax.grad(lambda w, x: function(w, x).sum()))(w, x)
    found = find_products(backward, [Weight("w", ("embed", "mlp")), None])
    assert found.total_flops == pytest.approx(count(backward).matmul)
