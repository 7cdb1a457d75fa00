# SPDX-License-Identifier: Apache-2.0
"""A ``ts.function`` under JAX's own transformations."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera.shard import tensor

X = jnp.linspace(-1.0, 1.0, 8, dtype=jnp.float32)


# --- under JAX's own transformations


def cube_slope(x):
    return ts.grad(jnp.sum(x**3), x)


def test_under_jit_it_is_part_of_that_program():
    step = ts.function(cube_slope)
    np.testing.assert_allclose(
        jax.jit(lambda x: step(x) + 1)(X), 3 * X**2 + 1, rtol=1e-6
    )
    assert step.num_programs() == 0


def test_under_grad_it_is_differentiated():
    step = ts.function(cube_slope)
    found = jax.grad(lambda x: jnp.sum(step(x)))(X)
    np.testing.assert_allclose(found, 6 * X, rtol=1e-6)


def test_under_vmap_it_sees_one_example():
    step = ts.function(cube_slope)
    rows = X.reshape(4, 2)
    np.testing.assert_allclose(jax.vmap(step)(rows), 3 * rows**2, rtol=1e-6)


def test_a_call_on_numbers_may_come_before_a_call_on_tracers():
    step = ts.function(cube_slope)
    step(X)
    for transformed in (jax.jit(step), jax.jit(jax.vmap(lambda x: step(x[None])[0]))):
        np.testing.assert_allclose(transformed(X), 3 * X**2, rtol=1e-6)
    np.testing.assert_allclose(
        jax.grad(lambda x: jnp.sum(step(x)))(X), 6 * X, rtol=1e-6
    )
    np.testing.assert_allclose(step(X), 3 * X**2, rtol=1e-6)
    assert step.num_programs() == 1


def test_under_scan_and_remat():
    step = ts.function(lambda x, power: x**power)

    def body(carry, _):
        return jax.checkpoint(lambda c: step(c, 2))(carry), None

    np.testing.assert_allclose(
        jax.lax.scan(body, X, None, length=2)[0], X**4, rtol=1e-6
    )


def test_inside_a_users_manual_region(dp_mesh):
    step = ts.function(lambda x, scale: x * scale * 2.0)

    def body(x):
        return step(x, jnp.float32(3)) + jax.lax.psum(step(x, 1).sum(), "dp")

    with dp_mesh:  # is no mesh for the blocks inside
        found = jax.shard_map(
            body, mesh=dp_mesh.jax, in_specs=P("dp"), out_specs=P("dp")
        )(X)
    np.testing.assert_allclose(found, X * 6 + X.sum() * 2, rtol=1e-6, atol=1e-6)


def test_under_jit_declared_layouts_hold(dp_mesh):
    step = ts.function(lambda x: x * 2.0, mesh=dp_mesh, out_specs=P("dp"))
    assert jax.jit(lambda x: step(x))(X).sharding.spec == P("dp")


def test_under_jit_it_may_close_over_what_is_traced():
    def outer(x):
        step = ts.function(lambda y: y * x)
        return step(x) + step(x + 1.0)

    np.testing.assert_allclose(jax.jit(outer)(X), X * X + (X + 1) * X, rtol=1e-6)


def test_under_jit_tensors_numpy_arrays_and_statics_mix():
    table = tensor((8,), init="ones", name="table")
    step = ts.function(lambda tree, n: tree["x"] * tree["t"] * tree["n"] * n)
    found = jax.jit(lambda x: step({"x": x, "t": table, "n": np.float32(2)}, 3))(X)
    np.testing.assert_array_equal(found, X * 6)


def test_a_transformed_call_is_traced_once():
    traces = []
    step = ts.function(lambda x: traces.append(0) or jnp.sum(x**2))
    for _ in range(3):
        jax.grad(step)(X)
    assert len(traces) == 1
