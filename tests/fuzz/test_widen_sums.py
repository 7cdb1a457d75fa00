# SPDX-License-Identifier: Apache-2.0
"""The gradient of a cast parameter is the exact sum, however the parameter is used.

All numbers are small integers, exact in bf16, and all sums are exact in f32. Most are
larger than 256, where bf16 skips odd numbers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tessera as ts
from tessera.tracing.casts import cast_parameter

SIZE, COUNT = 4, 1001


def view(rng):
    """A linear function of a matrix [4, 4] to another."""
    kind = rng.choice(
        ["transpose", "reshape", "scale", "negate", "halves", "roll", "constrain"]
    )
    match kind:
        case "transpose":
            return lambda w: w.T
        case "reshape":
            return lambda w: w.reshape(2, 8).reshape(SIZE, SIZE)
        case "scale":
            factor = int(rng.choice([-2, 2, 4]))
            return lambda w: w * jnp.asarray(factor, w.dtype)
        case "negate":
            return lambda w: -w
        case "halves":
            axis = int(rng.integers(2))
            return lambda w: jnp.concatenate(jnp.split(w, 2, axis)[::-1], axis)
        case "roll":
            return lambda w: jnp.roll(w, 1, axis=0)
        case _:
            return jax.lax.optimization_barrier


def use(rng):
    """A function of a matrix to an f32 scalar, linear in it, with large gradients."""
    rows = jnp.asarray(rng.integers(0, SIZE, COUNT) * rng.integers(0, 2), jnp.int32)
    x = jnp.asarray(rng.integers(-1, 3, (COUNT, SIZE)))
    results = {
        "index": lambda w: w[rows],
        "take": lambda w: jnp.take(w, rows, axis=0),
        "matmul": lambda w: x.astype(w.dtype) @ w,
        "bias": lambda w: jnp.zeros((COUNT, SIZE, SIZE), w.dtype) + w,
        "batched": lambda w: jnp.einsum("bni,ij->bnj", x[None].astype(w.dtype), w),
    }
    result = results[rng.choice(list(results))]
    return lambda w: jnp.sum(result(w).astype(jnp.float32))


def program(rng):
    views = [view(rng) for _ in range(rng.integers(0, 4))]
    uses = [use(rng) for _ in range(rng.integers(1, 4))]
    wrap = [lambda f: f, jax.jit, jax.checkpoint][rng.integers(3)]

    def loss(w):
        for each in views:
            w = each(w)
        return sum(wrap(each)(w) for each in uses)

    return loss


@pytest.mark.fuzz(sample=20, whole=500)
def test_gradients_of_random_uses_are_exact(seed):
    loss = program(np.random.default_rng(seed))
    w = jnp.ones((SIZE, SIZE))

    @ts.function
    def step(w):
        return ts.grad(loss(cast_parameter(w, jnp.bfloat16)), w)

    np.testing.assert_array_equal(step(w), jax.grad(loss)(w))


@pytest.mark.fuzz(sample=5, whole=100)
def test_gradients_of_layers_in_a_loop_are_exact(seed):
    loss = program(np.random.default_rng(seed))
    layers = jnp.ones((3, SIZE, SIZE))

    def total(layers, cast):
        def body(total, w):
            return total + loss(cast(w)), None

        return jax.lax.scan(jax.checkpoint(body), jnp.float32(0), layers)[0]

    @ts.function
    def step(layers):
        return ts.grad(total(layers, lambda w: cast_parameter(w, "bfloat16")), layers)

    expected = jax.grad(lambda layers: total(layers, lambda w: w))(layers)
    np.testing.assert_array_equal(step(layers), expected)
