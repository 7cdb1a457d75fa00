# SPDX-License-Identifier: Apache-2.0
"""What the tests of gradients compare: a loss, and a step with plain JAX's program."""

import jax
import jax.numpy as jnp
import numpy as np

import tessera as ts
from tessera.jax_compat import jaxprs

W = jnp.linspace(-1.0, 1.0, 6, dtype=jnp.float32).reshape(2, 3)
X = jnp.linspace(-1.0, 2.0, 16, dtype=jnp.float32).reshape(8, 2)
BOTH = {"w": W, "x": X}


def loss_of(w, x):
    return jnp.sum(jnp.tanh(x @ w) ** 2)


def count(program, name="dot_general"):
    """How often a primitive occurs, nested programs included."""
    return sum(
        (equation.primitive.name == name)
        + sum(count(inner, name) for _, inner in jaxprs.nested(equation))
        for equation in jaxprs.equations(program)
    )


def assert_same(step, reference, *args, rtol=1e-5):
    """A Tessera function gives what plain JAX gives, with as many matmuls."""
    traced = ts.function(step).trace(*args)
    plain = jax.make_jaxpr(reference)(*args)
    assert count(traced.graph.program) == count(plain)
    found, expected = ts.function(step)(*args), jax.jit(reference)(*args)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6),
        found,
        expected,
    )
