# SPDX-License-Identifier: Apache-2.0
"""Outputs that plainly have a layout are declared to have it, so it is checked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera.errors import ShardDivisibilityError
from tessera.graph.passes.assign_output_layouts import assign_output_layouts

X = jnp.arange(32.0).reshape(8, 4)


def outputs(function, *args, **options):
    """Declared output layouts before and after the pass."""
    traced = ts.function(function, **options).trace(*args)
    return (
        [value.spec for value in traced.origin.graph.outputs],
        [value.spec for value in traced.graph.outputs],
    )


def constrained(x, mesh, *spec):
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))


def test_an_output_that_is_an_input_has_its_layout(grid_mesh):
    found = outputs(
        lambda x, y: (y, x, x + y),
        X,
        X,
        mesh=grid_mesh,
        in_specs={"x": P("tp"), "y": P(None, "dp")},
    )
    assert found == ([None, None, None], [P(None, "dp"), P("tp"), None])


def test_an_output_that_is_constrained_has_that_layout(grid_mesh):
    found = outputs(lambda x: constrained(x, grid_mesh.jax, "tp"), X, mesh=grid_mesh)
    assert found == ([None], [P("tp")])


def test_a_constraint_that_does_not_divide_an_output_is_refused(dp_mesh):
    step = ts.function(lambda x: constrained(x * 2, dp_mesh.jax, "dp"), mesh=dp_mesh)
    with pytest.raises(ShardDivisibilityError) as caught:
        step(np.ones((10, 3)))
    assert str(caught.value).startswith(
        "[T201] a constraint does not divide output 'result'\n"
        "  got: shape (10, 3), dim 0 = 10, axis size 8\n"
        "  fix: use 8 or 16, or drop 'dp' from the spec\n"
    )


def test_sums_see_every_row_of_what_a_constraint_splits_unevenly(dp_mesh):
    step = ts.function(
        lambda x: jax.nn.softmax(constrained(x, dp_mesh.jax, "dp"), 0).sum(0) + x.max(),
        mesh=dp_mesh,
    )
    x = -1 - np.random.default_rng(0).random((10, 3), np.float32)
    np.testing.assert_allclose(step(x), np.full(3, 1 + x.max()), atol=1e-6)


def test_gradients_have_the_layout_of_their_weights(grid_mesh):
    step = ts.function(
        lambda w, x: ts.grad(jnp.sum((x @ w) ** 2), w),
        mesh=grid_mesh,
        in_specs={"w": P(None, "tp"), "x": P("dp")},
    )
    assert [v.spec for v in step.trace(X[:4], X).graph.outputs] == [P(None, "tp")]
    assert step(X[:4], X).sharding.spec == P(None, "tp")


def test_a_declared_layout_is_not_touched(grid_mesh):
    found = outputs(
        lambda x: constrained(x, grid_mesh.jax, "tp"),
        X,
        mesh=grid_mesh,
        out_specs=P("dp"),
    )
    assert found == ([P("dp")], [P("dp")])


def test_a_constant_output_stays_undeclared(grid_mesh):
    assert outputs(lambda x: 1.0, X, mesh=grid_mesh) == ([None], [None])


def test_without_a_mesh_there_is_nothing_to_do():
    traced = ts.function(lambda x: x).trace(X)
    graph = traced.origin.graph
    assert assign_output_layouts(graph) is graph


def test_the_pass_does_nothing_twice(grid_mesh):
    graph = ts.function(lambda x: x, mesh=grid_mesh).trace(X).graph
    assert assign_output_layouts(graph) == graph


def test_a_constraint_on_another_grid_is_the_users_own(grid_mesh):
    other = jax.make_mesh((8,), ("z",), axis_types=(AxisType.Auto,))

    def function(x):
        return constrained(x, other, "z")

    assert outputs(function, X, mesh=grid_mesh) == ([None], [None])
    np.testing.assert_array_equal(ts.function(function, mesh=grid_mesh)(X), X)


def test_a_constraint_that_leaves_dims_open_declares_nothing(grid_mesh):
    def function(x):
        return constrained(x * 2.0, grid_mesh.jax, "dp", P.UNCONSTRAINED)

    assert outputs(function, X, mesh=grid_mesh) == ([None], [None])
    np.testing.assert_array_equal(ts.function(function, mesh=grid_mesh)(X), X * 2)


def test_a_constraint_on_a_mesh_of_other_machines(large_mesh):
    x = jax.ShapeDtypeStruct((12, 4), jnp.float32)
    found = outputs(
        lambda x: constrained(x, large_mesh.compile_mesh, "tp"), x, mesh=large_mesh
    )
    assert found == ([None], [P("tp")])
