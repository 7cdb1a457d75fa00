# SPDX-License-Identifier: Apache-2.0
"""The mesh of a call is that of its arrays, and there is one."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from tessera.errors import MeshConflictError
from tessera.graph.tracer.argument_leaves import Leaf
from tessera.graph.tracer.mesh_inference import common_mesh
from tessera.mesh import Mesh

X = jnp.ones((8, 2))


def on(mesh, *spec):
    return jax.device_put(X, NamedSharding(mesh.jax, P(*spec)))


def test_the_common_mesh_is_that_of_the_arrays_that_have_one(dp_mesh):
    leaves = [Leaf("x", X), Leaf("y", on(dp_mesh)), Leaf("z", on(dp_mesh, "dp"))]
    assert common_mesh(leaves, []) == dp_mesh
    assert common_mesh(leaves[:1], []) is None
    assert common_mesh(leaves[:1], [("the step", dp_mesh)]) == dp_mesh


def test_arrays_on_meshes_of_the_same_devices_have_one_that_has_axes_for_all(
    dp_mesh, grid_mesh
):
    whole, split, tiled = on(dp_mesh), on(dp_mesh, "dp"), on(grid_mesh, "dp", None)
    for arrays in ([split, tiled], [tiled, split]):
        assert common_mesh([*map(Leaf, "xy", arrays)], []) == grid_mesh
    assert common_mesh([Leaf("x", whole)], [("the step", grid_mesh)]) == grid_mesh
    with pytest.raises(MeshConflictError, match="the step"):
        common_mesh([Leaf("x", tiled)], [("the step", dp_mesh)])


def test_arrays_on_two_meshes_have_none_in_common(dp_mesh):
    grid_mesh = Mesh(["dp", "tp"], devices=range(7, -1, -1), shape=(2, 4))
    leaves = [Leaf("x", on(dp_mesh)), Leaf("y", on(grid_mesh)), Leaf("z", on(dp_mesh))]
    with pytest.raises(MeshConflictError) as caught:
        common_mesh(leaves, [])
    assert str(caught.value) == (
        "[T308] the inputs of one step live on different meshes\n"
        "  got: dp mesh, 8 of devices (0, 1, 2, 3, 4, 5, 6, 7): x, z\n"
        "  got: dp × tp mesh, 2 × 4 of devices (7, 6, 5, 4, 3, 2, 1, 0): y\n"
        "  fix: put them on one: jax.device_put(x, NamedSharding(mesh.jax, P(...)))\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T308.html"
    )


def test_an_array_on_another_mesh_than_the_steps_is_refused(dp_mesh):
    grid_mesh = Mesh(["dp", "tp"], devices=range(1, 9), shape=(2, 4))
    with pytest.raises(MeshConflictError, match="the step"):
        common_mesh([Leaf("x", on(dp_mesh))], [("the step", grid_mesh)])


def test_an_array_on_one_device_does_not_fit_a_mesh_of_several(dp_mesh):
    there = jax.device_put(X, jax.devices()[3])
    with pytest.raises(MeshConflictError, match="device mesh, 1 of devices"):
        common_mesh([Leaf("x", there), Leaf("y", on(dp_mesh))], [])


def test_a_mesh_of_one_device_takes_the_arrays_on_that_device():
    mesh = Mesh(["dp"], devices=[3])
    placed = jax.device_put(X, SingleDeviceSharding(jax.devices()[3]))
    assert common_mesh([Leaf("x", placed)], [("the step", mesh)]) == mesh
