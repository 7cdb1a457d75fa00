# SPDX-License-Identifier: Apache-2.0
"""Arrays, shardings and meshes of JAX mean to ``ts.jit`` what they mean to jax.jit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tessera as ts

X = np.arange(32, dtype=np.float32).reshape(8, 4)


def on(mesh, array, *spec):
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))


# --- layouts in memory


@pytest.mark.parametrize("spec", [P("dp"), P()], ids=str)
def test_arrays_are_taken_in_any_layout_in_memory(dp_mesh, spec):
    sharding = NamedSharding(dp_mesh.jax, spec)
    rows, columns = (
        jax.device_put(X, Format(Layout(order), sharding)) for order in [(0, 1), (1, 0)]
    )
    assert columns.format.layout != rows.format.layout
    step = ts.jit(lambda x, y: x + 2 * y + columns)
    for _ in range(2):  # the second time JAX's C++ dispatch knows them
        for x, y in [(columns, rows), (rows, rows), (rows, columns)]:
            np.testing.assert_array_equal(step(x, y), 4 * X)
    assert step.num_programs() == 1


def test_arrays_of_int4_are_taken_wherever_they_lie(dp_mesh):
    small = jnp.arange(-4, 4, dtype=jnp.int4)
    step = ts.jit(lambda x: x + x)
    for x in (np.asarray(small), small, on(dp_mesh.jax, small, "dp")):
        for _ in range(2):
            np.testing.assert_array_equal(step(x), small + small)


# --- several meshes of the same devices


def summed(jit, *arrays, **options):
    found = jit(lambda x, y: x + y, **options)(*arrays)
    np.testing.assert_array_equal(found, 2 * X)
    return found


@pytest.mark.parametrize("specs", [(["dp"], ["dp", "tp"]), (["dp"], ["tp"])], ids=str)
def test_arrays_may_be_on_several_meshes_of_the_same_devices(dp_mesh, grid_mesh, specs):
    x, y = (on(m.jax, X, *s) for m, s in zip((dp_mesh, grid_mesh), specs, strict=True))
    for arrays in ((x, y), (y, x)):
        found, wanted = summed(ts.jit, *arrays), summed(jax.jit, *arrays)
        assert found.sharding.is_equivalent_to(wanted.sharding, 2)
    assert ts.jit(lambda x: x + y)(x).sharding.device_set == y.sharding.device_set
    with jax.disable_jit():
        summed(ts.jit, x, y)


def test_shardings_may_be_declared_on_several_meshes_of_the_same_devices(
    dp_mesh, grid_mesh
):
    one = NamedSharding(dp_mesh.jax, P("dp"))
    other = NamedSharding(grid_mesh.jax, P(None, "tp"))
    options = {"in_shardings": (one, other), "out_shardings": other}
    found = summed(ts.jit, X, X, **options)
    assert found.sharding.is_equivalent_to(other, 2)
    assert summed(ts.jit, on(dp_mesh.jax, X, "dp"), X, **options).sharding == other


# --- meshes that are set


def test_another_mesh_that_is_set_is_another_program():
    """Of the same shape, so that the meshes differ in their devices alone."""
    step = ts.jit(lambda x: x * 2, out_shardings=P("x"))
    for ids in ([0, 1], [2, 3], [1, 0], [0, 1]):
        with jax.set_mesh(ts.Mesh(["x"], devices=ids).jax):
            found = step(X).addressable_shards
        assert [shard.device.id for shard in found] == ids
    assert step.num_programs() == 3


def test_a_sharding_on_an_abstract_mesh_is_on_the_mesh_that_is_set():
    meshes = [ts.Mesh(["x"], devices=ids).jax for ids in ([0, 1], [2, 3])]
    split = NamedSharding(meshes[0].abstract_mesh, P("x"))
    step = ts.jit(lambda x: x * 2, in_shardings=split, out_shardings=split)
    outer = ts.jit(lambda x: step(x))
    shape = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=split)
    for mesh in meshes:
        with jax.set_mesh(mesh):
            for function in (step, outer):
                assert function(X).sharding == NamedSharding(mesh, P("x"))
            compiled = ts.jit(lambda x: x * 2).compile(shape)
            assert compiled(on(mesh, X, "x")).sharding.mesh == mesh
