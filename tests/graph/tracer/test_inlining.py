# SPDX-License-Identifier: Apache-2.0
"""A function called inside another is part of its program, layouts and all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera.errors import (
    LayoutMismatchError,
    MeshConflictError,
    NoMeshError,
    ShardDivisibilityError,
)

X = jnp.arange(32.0).reshape(8, 4)


def double(x):
    return x * 2.0


def constraints(traced):
    return traced.as_text().count("sharding_constraint[")


def test_a_plain_function_leaves_no_seam():
    inner = ts.function(double)
    outer = ts.function(lambda x: inner(x) + 1.0)
    np.testing.assert_array_equal(outer(X), X * 2 + 1)
    assert inner.num_programs() == 0
    assert outer.trace(X).as_text().count("= mul") == 1
    assert constraints(outer.trace(X)) == 0


def test_static_arguments_are_plain_python_inside():
    inner = ts.function(lambda x, power: x**power if power else x)
    outer = ts.function(lambda x: inner(x, 0) + inner(x, power=2))
    np.testing.assert_array_equal(outer(X), X + X**2)


def test_the_layouts_of_an_inner_function_hold(grid_mesh):
    inner = ts.function(double, in_specs={"x": P("tp")}, out_specs=P("dp"))
    outer = ts.function(lambda x: inner(x + 1.0), mesh=grid_mesh)
    result = outer(X)
    np.testing.assert_array_equal(result, (X + 1) * 2)
    assert result.sharding.spec == P("dp")
    assert constraints(outer.trace(X)) == 2


def test_the_result_of_an_inner_function_may_hold_anything(grid_mesh):
    inner = ts.function(
        lambda x: {"x": x + 1.0, "name": "inner", "none": None, "n": 3},
        out_specs={"x": P("dp"), "name": None, "none": None, "n": None},
    )

    def body(x):
        found = inner(x)
        assert (found["name"], found["none"], found["n"]) == ("inner", None, 3)
        return found["x"]

    assert ts.function(body, mesh=grid_mesh)(X).sharding.spec == P("dp")


def test_the_mesh_of_an_inner_function_is_the_programs(grid_mesh):
    inner = ts.function(double, mesh=grid_mesh, out_specs=P("dp"))
    outer = ts.function(lambda x: inner(x))
    assert outer(X).sharding.spec == P("dp")
    assert outer.last.traced.graph.mesh == grid_mesh


def test_an_inner_function_on_another_mesh_is_refused(grid_mesh, dp_mesh):
    inner = ts.function(double, mesh=dp_mesh)
    outer = ts.function(lambda x: inner(x), mesh=grid_mesh)
    with pytest.raises(MeshConflictError, match=r"dp mesh, 8 of devices .*: double"):
        outer(X)


def test_the_layouts_of_an_inner_function_need_a_mesh():
    inner = ts.function(double, out_specs=P("dp"))
    with pytest.raises(NoMeshError, match="'double' has in_specs or out_specs"):
        ts.function(lambda x: inner(x))(X)


def test_the_layouts_of_an_inner_function_are_checked(grid_mesh):
    inner = ts.function(double, in_specs={"x": P("tp")})
    outer = ts.function(lambda x: inner(x[:7]), mesh=grid_mesh)
    with pytest.raises(ShardDivisibilityError, match="'x' cannot be split evenly"):
        outer(X)
    held = jax.device_put(X, NamedSharding(grid_mesh.jax, P("dp")))
    with pytest.raises(LayoutMismatchError, match="'double' is given arrays"):
        ts.function(lambda: inner(held))()
