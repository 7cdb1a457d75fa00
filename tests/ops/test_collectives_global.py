# SPDX-License-Identifier: Apache-2.0
"""Collectives on global arrays, whose layouts say what the blocks are."""

from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding

from tessera import dist
from tessera.tracing import scope
from tests.ops.regions import P, numbers, on


def layout(x):
    return tuple(x.sharding.spec) + (None,) * (x.ndim - len(x.sharding.spec))


@contextmanager
def count_compilations():
    seen = []

    def listen(name, duration, **_):
        if name == "/jax/core/compile/backend_compile_duration":
            seen.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_all_reduce_adds_up_the_blocks_of_a_split_dim(grid_mesh):
    x = numbers(8, 3)
    got = dist.all_reduce(on(grid_mesh, x, "dp"), "dp")
    np.testing.assert_array_equal(got, x[:4] + x[4:])
    assert layout(got) == (None, None)


def test_all_reduce_of_copies_is_as_many_times_the_array(grid_mesh):
    x = numbers(8, 3)
    got = dist.all_reduce(on(grid_mesh, x, "dp"), "tp")
    np.testing.assert_array_equal(got, 4 * x)
    assert layout(got) == ("dp", None)


def test_all_reduce_over_two_axes(grid_mesh):
    x = numbers(4, 8)
    got = dist.all_reduce(on(grid_mesh, x, "tp", "dp"), ("dp", "tp"), op="mean")
    np.testing.assert_allclose(got, x.reshape(4, 1, 2, 4).mean(axis=(0, 2)))
    assert layout(got) == (None, None)


def test_all_reduce_keeps_the_other_axes_of_a_dim(grid_mesh):
    x = numbers(8)
    got = dist.all_reduce(on(grid_mesh, x, ("dp", "tp")), "dp")
    np.testing.assert_array_equal(got, x[:4] + x[4:])
    assert layout(got) == ("tp",)


def test_reduce_scatter_moves_the_axis_to_its_dim(grid_mesh):
    x = numbers(8, 4)
    got = dist.reduce_scatter(on(grid_mesh, x, "dp"), "dp", dim=1)
    np.testing.assert_array_equal(got, x[:4] + x[4:])
    assert layout(got) == (None, "dp")


def test_reduce_scatter_stays_on_the_split_dim(grid_mesh):
    x = numbers(8, 4)
    got = dist.reduce_scatter(on(grid_mesh, x, "dp"), "dp")
    np.testing.assert_array_equal(got, x[:4] + x[4:])
    assert layout(got) == ("dp", None)


def test_reduce_scatter_of_copies_splits_the_last_dim(grid_mesh):
    x = numbers(8, 4)
    got = dist.reduce_scatter(on(grid_mesh, x), "tp")
    np.testing.assert_array_equal(got, 4 * x)
    assert layout(got) == (None, "tp")


@pytest.mark.parametrize("spec", [(), ("tp",), (None, "tp"), ("dp", "tp")])
def test_scatter_then_gather_of_a_global_array_is_a_reduction(grid_mesh, spec):
    x = on(grid_mesh, numbers(16, 16), *spec)
    got = dist.all_gather(dist.reduce_scatter(x, "tp"), "tp")
    np.testing.assert_allclose(got, dist.all_reduce(x, "tp"))
    assert layout(got) == layout(dist.all_reduce(x, "tp"))


@pytest.mark.parametrize("axis", [("dp", "tp"), ("tp", "dp")])
def test_reduce_scatter_of_an_array_that_one_of_the_axes_splits(grid_mesh, axis):
    x = numbers(4, 8)
    got = dist.reduce_scatter(on(grid_mesh, x, "tp"), axis)
    np.testing.assert_array_equal(got, 2 * x.sum(axis=0, keepdims=True))
    assert layout(got) == (None, axis)


def test_the_gradient_of_a_reduce_scatter_of_copies_counts_each_copy(grid_mesh):
    x, weights = on(grid_mesh, numbers(4, 8), "tp"), numbers(1, 8)

    def loss(x):
        return (dist.reduce_scatter(x, ("dp", "tp")) * weights).sum()

    np.testing.assert_allclose(jax.grad(loss)(x), np.tile(2 * weights, (4, 1)))


def test_all_gather_along_the_split_dim_keeps_the_values(grid_mesh):
    x = numbers(8, 4)
    got = dist.all_gather(on(grid_mesh, x, ("dp", "tp")), "tp")
    np.testing.assert_array_equal(got, x)
    assert layout(got) == ("dp", None)


def test_all_gather_along_another_dim_lays_the_blocks_side_by_side(grid_mesh):
    x = numbers(4, 3)
    got = dist.all_gather(on(grid_mesh, x, "dp"), "dp", dim=1)
    np.testing.assert_array_equal(got, np.concatenate([x[:2], x[2:]], axis=1))


def test_all_to_all_moves_the_split_to_another_dim(grid_mesh):
    x = numbers(8, 8)
    got = dist.all_to_all(on(grid_mesh, x, "tp"), "tp", split_dim=1, concat_dim=0)
    np.testing.assert_array_equal(got, x)
    assert layout(got) == (None, "tp")


def test_broadcast_gives_everyone_the_block_of_the_root(grid_mesh):
    x = numbers(8, 2)
    got = dist.broadcast(on(grid_mesh, x, "tp"), "tp", root=2)
    np.testing.assert_array_equal(got, x[4:6])
    assert got.sharding.is_fully_replicated


def test_scatter_splits_an_array_that_everyone_has(grid_mesh):
    x = numbers(8, 2)
    got = dist.scatter(on(grid_mesh, x), "tp")
    np.testing.assert_array_equal(got, x)
    assert layout(got) == ("tp", None)


def test_gather_has_the_whole_array_in_the_block_of_the_root(grid_mesh):
    x = numbers(8)
    got = dist.gather(on(grid_mesh, x, "tp"), "tp", root=1)
    want = np.zeros((4, 8), np.float32)
    want[1] = x
    np.testing.assert_array_equal(got, want.reshape(-1))
    assert layout(got) == ("tp",)


def test_send_and_recv_keep_the_layout(grid_mesh):
    x = on(grid_mesh, numbers(4), "tp")
    assert dist.send(x, "tp", 1, 3).tolist() == [0, 0, 0, 1]
    assert dist.recv(x, "tp", [0, 1], [1, 0]).tolist() == [1, 0, 2, 3]
    assert layout(dist.recv(x, "tp", 0, 1)) == ("tp",)


@pytest.mark.parametrize("axis", [("dp", "tp"), ("tp", "dp")])
def test_send_counts_ranks_along_the_axes_as_they_are_named(grid_mesh, axis):
    x = on(grid_mesh, numbers(8) + 1, axis)
    assert dist.send(x, axis, 1, 2).tolist() == [0, 0, 2, 0, 0, 0, 0, 0]
    assert dist.recv(x, axis, 1, 2).tolist() == [1, 2, 2, 4, 5, 6, 7, 8]


def test_send_of_copies_has_one_block_per_device(grid_mesh):
    got = dist.send(on(grid_mesh, numbers(2)), "dp", 0, 1)
    assert got.tolist() == [0, 0, 0, 1]
    assert layout(got) == ("dp",)


def test_lazy_tensors_and_trees_of_them_are_operands(dp_mesh):
    spec = dist.ShardSpec(("row",), ("dp",))
    tree = {"w": dist.tensor((16,), spec, dp_mesh, init="ones")}
    assert dist.all_reduce(tree, "dp")["w"].tolist() == [8, 8]


def test_arrays_without_a_layout_are_copies_on_the_open_mesh(dp_mesh):
    with dp_mesh:
        assert dist.all_reduce(np.ones(2, np.float32), "dp").tolist() == [8, 8]
        elsewhere = jax.device_put(jnp.ones(2), jax.devices()[3])
        assert isinstance(elsewhere.sharding, SingleDeviceSharding)
        assert dist.all_reduce(elsewhere, "dp").tolist() == [8, 8]


def test_a_global_collective_is_compiled_once(dp_mesh):
    x = on(dp_mesh, numbers(8), "dp")
    y = x + 1
    dist.all_reduce(x, "dp")
    with count_compilations() as compilations:
        dist.all_reduce(y, "dp")
    assert not compilations


def test_global_collectives_are_differentiated_eagerly(grid_mesh):
    x = on(grid_mesh, numbers(8, 2), "dp")

    def loss(x):
        return (dist.all_reduce(x, "dp") ** 2).sum()

    half = numbers(8, 2)
    total = half[:4] + half[4:]
    np.testing.assert_allclose(jax.grad(loss)(x), 2 * np.concatenate([total, total]))


@pytest.mark.parametrize("fixture", ["grid_mesh", "large_mesh"])
def test_in_a_trace_the_recorded_layout_counts(fixture, request):
    mesh = request.getfixturevalue(fixture)
    parts = mesh.shape["dp"]

    def step(x):
        with scope.opened(scope.Scope(mesh=mesh)):
            scope.record_layout(x, mesh, P("dp"))
            total = dist.all_reduce(x, "dp")
            assert scope.layout_of(total) == (mesh, P())
            split = dist.scatter(total, "tp", dim=1)
            assert scope.layout_of(split) == (mesh, P(None, "tp"))
            return total, dist.all_gather(split, "tp")

    rows = NamedSharding(mesh.compile_mesh, P("dp"))
    x = jax.ShapeDtypeStruct((4 * parts, 24), jnp.float32, sharding=rows)
    total, again = jax.eval_shape(step, x)
    assert total.shape == again.shape == (4, 24)
    assert "all-reduce" in jax.jit(step).lower(x).compile().as_text()
