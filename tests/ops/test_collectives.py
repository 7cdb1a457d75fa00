# SPDX-License-Identifier: Apache-2.0
"""Collectives in an SPMD region, where every device has its own block."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tessera import dist
from tessera.analysis.ledger import collectives
from tests.ops.regions import P, in_region, numbers


def moved(function, mesh, x):
    """Kind, axes and bytes of every collective in the compiled program, in order."""
    rows = collectives(function.lower(x).compile(), mesh).rows
    return [(row.kind, row.axes, row.nbytes) for row in rows]


# Every block of x, by rank along dp, is x[rank]; along (dp, tp) it is x[dp, tp].

REDUCTIONS = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}


@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("axis", ["dp", ("dp", "tp"), ("tp", "dp")])
def test_all_reduce_combines_blocks(grid_mesh, op, axis):
    x = numbers(2, 4, 3)
    dims = {"dp": (0,)}.get(axis, (0, 1))
    out = P() if len(dims) == 2 else P(None, "tp")

    def body(block):
        return dist.all_reduce(block, axis, op)

    got = in_region(grid_mesh, body, P("dp", "tp"), out)(x)
    want = REDUCTIONS[op](x, axis=dims, keepdims=True)
    np.testing.assert_allclose(got, want)


def test_allreduce_is_all_reduce():
    assert dist.allreduce is dist.all_reduce


def test_over_two_axes_a_sum_scatters_inside_and_crosses_with_the_parts(grid_mesh):
    def body(block):
        return dist.all_reduce(block, ("dp", "tp"))

    assert moved(in_region(grid_mesh, body, P(), P()), grid_mesh, numbers(8)) == [
        ("reduce-scatter", ("tp",), 32),
        ("all-reduce", ("dp",), 8),
        ("all-gather", ("tp",), 32),
    ]


def test_over_three_axes_the_outer_two_are_again_hierarchical(cube_mesh):
    x = numbers(8, 5)
    names = ("dp", "pp", "tp")

    def body(block):
        return dist.all_reduce(block, names)

    mapped = in_region(cube_mesh, body, P(names), P())
    np.testing.assert_allclose(mapped(x), x.sum(axis=0, keepdims=True))
    assert [(kind, axes) for kind, axes, _ in moved(mapped, cube_mesh, x)] == [
        ("reduce-scatter", ("tp",)),
        ("reduce-scatter", ("pp",)),
        ("all-reduce", ("dp",)),
        ("all-gather", ("pp",)),
        ("all-gather", ("tp",)),
    ]


@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0, 4)])
def test_a_hierarchical_sum_pads_what_does_not_divide(grid_mesh, shape):
    def body(x):
        return dist.all_reduce(x, ("dp", "tp"))

    x = np.ones(shape, np.float32)
    got = in_region(grid_mesh, body, P(), P())(x)
    assert got.shape == shape
    np.testing.assert_array_equal(got, x * 8)


@pytest.mark.parametrize("size", [8, 10, 1])
def test_what_does_not_divide_crosses_as_little_as_the_next_multiple(grid_mesh, size):
    def body(block):
        return dist.all_reduce(block, ("dp", "tp"))

    whole = 4 * -(-size // 4) * 4
    assert moved(in_region(grid_mesh, body, P(), P()), grid_mesh, numbers(size)) == [
        ("reduce-scatter", ("tp",), whole),
        ("all-reduce", ("dp",), whole // 4),
        ("all-gather", ("tp",), whole),
    ]


def test_reduce_scatter_leaves_each_rank_its_part(dp_mesh):
    x = numbers(8, 2, 16)

    def body(block):
        return dist.reduce_scatter(block[0], "dp")

    got = in_region(dp_mesh, body, P("dp"), P(None, "dp"))(x)
    np.testing.assert_allclose(got, x.sum(axis=0))


def test_reduce_scatter_divides_a_mean_along_a_dim(dp_mesh):
    x = numbers(8, 16, 2)

    def body(block):
        return dist.reduce_scatter(block[0], "dp", dim=0, op="mean")

    got = in_region(dp_mesh, body, P("dp"), P("dp"))(x)
    np.testing.assert_allclose(got, x.mean(axis=0))


@pytest.mark.parametrize("axis", ["tp", ("dp", "tp")])
def test_scatter_then_gather_is_a_reduction(grid_mesh, axis):
    x = numbers(2, 4, 3, 8)

    def body(block):
        split = dist.reduce_scatter(block, axis)
        return dist.all_gather(split, axis) - dist.all_reduce(block, axis)

    out = P("dp") if axis == "tp" else P()
    assert not in_region(grid_mesh, body, P("dp", "tp"), out)(x).any()


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_all_gather_joins_in_the_order_of_ranks(dp_mesh, dim):
    x = numbers(8, 3, 2)

    def body(block):
        return dist.all_gather(block[0], "dp", dim=dim)

    got = in_region(dp_mesh, body, P("dp"), P())(x)
    np.testing.assert_array_equal(got, np.concatenate(list(x), axis=dim))


def test_ranks_of_several_axes_count_with_the_last_fastest(grid_mesh):
    x = numbers(2, 4, 1)

    def body(block):
        return dist.all_gather(block[0, 0], ("tp", "dp"))

    got = in_region(grid_mesh, body, P("dp", "tp"), P())(x)
    np.testing.assert_array_equal(got, x[:, :, 0].T.reshape(-1))


def test_all_to_all_sends_part_j_to_rank_j(dp_mesh):
    x = numbers(8, 16, 3)

    def body(block):
        return dist.all_to_all(block, "dp", split_dim=1, concat_dim=2)

    got = in_region(dp_mesh, body, P("dp"), P("dp"))(x)
    for rank in range(8):
        parts = [x[source, 2 * rank : 2 * rank + 2] for source in range(8)]
        np.testing.assert_array_equal(got[rank], np.concatenate(parts, axis=1))


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.bool_, jnp.bfloat16])
def test_broadcast_gives_the_block_of_the_root(dp_mesh, dtype):
    x = (numbers(8, 4) % 3).astype(dtype)

    def body(block):
        return dist.broadcast(block, "dp", root=5)

    got = in_region(dp_mesh, body, P("dp"), P())(x)
    assert got.dtype == dtype
    np.testing.assert_array_equal(np.asarray(got), x[5:6])


def test_broadcast_ignores_what_the_others_have(dp_mesh):
    x = np.full((8,), np.nan, np.float32)
    x[2] = 3

    def body(block):
        return dist.broadcast(block, "dp", root=2)

    got = np.asarray(in_region(dp_mesh, body, P("dp"), P())(x))
    assert got.tolist() == [3]


@pytest.mark.parametrize("dtype", [np.float32, np.bool_])
def test_scatter_divides_the_block_of_the_root(dp_mesh, dtype):
    x = (numbers(8, 16) % 3).astype(dtype)

    def body(block):
        return dist.scatter(block[0], "dp", root=3)

    got = in_region(dp_mesh, body, P("dp"), P("dp"))(x)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, x[3])


def test_gather_fills_the_root_and_nobody_else(dp_mesh):
    x = numbers(8, 2)

    def body(block):
        return dist.gather(block, "dp", root=6)[None]

    got = in_region(dp_mesh, body, P("dp"), P("dp"))(x)
    np.testing.assert_array_equal(got[6], x)
    assert not np.delete(np.asarray(got), 6, axis=0).any()


def test_send_gives_what_arrived_and_zeros_elsewhere(dp_mesh):
    x = numbers(8) + 1

    def body(block):
        return dist.send(block, "dp", source=2, destination=5)

    got = in_region(dp_mesh, body, P("dp"), P("dp"))(x)
    assert got.tolist() == [0, 0, 0, 0, 0, 3, 0, 0]


def test_recv_keeps_the_own_block_where_nothing_arrived(dp_mesh):
    x = numbers(8)

    def body(block):
        return dist.recv(block, "dp", source=range(7), destination=range(1, 8))

    got = in_region(dp_mesh, body, P("dp"), P("dp"))(x)
    assert got.tolist() == [0, 0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("vma", [True, False])
@pytest.mark.parametrize("axis", [("dp", "tp"), ("tp", "dp")])
def test_send_and_recv_count_ranks_along_the_axes_as_they_are_named(
    grid_mesh, axis, vma
):
    x = numbers(8) + 1

    def body(block):
        return dist.send(block, axis, 1, 2), dist.recv(block, axis, [1, 6], [2, 0])

    region = jax.shard_map(
        body, mesh=grid_mesh.jax, in_specs=P(axis), out_specs=P(axis), check_vma=vma
    )
    sent, received = jax.jit(region)(x)
    assert sent.tolist() == [0, 0, 2, 0, 0, 0, 0, 0]
    assert received.tolist() == [7, 2, 2, 4, 5, 6, 7, 8]


def test_send_is_differentiated_along_the_axes_as_they_are_named(grid_mesh):
    axis = ("tp", "dp")

    def body(block):
        return dist.send(block, axis, 1, 2)

    region = in_region(grid_mesh, body, P(axis), P(axis))
    slope = jax.grad(lambda x: (region(x) * numbers(8)).sum())(numbers(8))
    assert slope.tolist() == [0, 2, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("vma", [True, False])
@pytest.mark.parametrize("axis", [("dp", "tp"), ("tp", "dp")])
def test_reduce_scatter_adds_up_blocks_that_some_of_the_axes_hold_alike(
    grid_mesh, axis, vma
):
    x = numbers(4, 8)

    def body(block):
        return dist.reduce_scatter(block[0], axis)

    region = jax.shard_map(
        body, mesh=grid_mesh.jax, in_specs=P("tp"), out_specs=P(axis), check_vma=vma
    )
    np.testing.assert_array_equal(jax.jit(region)(x), 2 * x.sum(axis=0))


def test_a_tree_is_reduced_leaf_by_leaf(dp_mesh):
    tree = {"a": numbers(8), "b": [numbers(8, 2)]}

    def body(blocks):
        return dist.all_reduce(blocks, "dp")

    got = in_region(dp_mesh, body, P("dp"), P())(tree)
    assert got["a"].tolist() == [28]
    assert got["b"][0].tolist() == [[56, 64]]


def test_gradients_flow_through_collectives(grid_mesh):
    x = numbers(2, 4, 4)

    def loss(x):
        def body(block):
            total = dist.all_reduce(block**2, ("dp", "tp"))
            return total + dist.all_gather(
                dist.reduce_scatter(block, ("dp", "tp"), dim=2), ("dp", "tp"), dim=2
            )

        return in_region(grid_mesh, body, P("dp", "tp"), P())(x).sum()

    wide = np.concatenate([x, x], axis=2)
    np.testing.assert_allclose(jax.grad(loss)(wide), 2 * wide + 1, rtol=1e-6)
