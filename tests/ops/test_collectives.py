# SPDX-License-Identifier: Apache-2.0
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from tessera import dist, scope
from tessera.analysis.ledger import collectives
from tessera.errors import (
    CollectiveError,
    DimError,
    NoMeshError,
    ShardDivisibilityError,
    UnknownAxisError,
)

P = PartitionSpec


def on(mesh, x, *spec):
    return jax.device_put(x, NamedSharding(mesh.jax, P(*spec)))


def in_region(mesh, body, in_spec, out_spec):
    mapped = jax.shard_map(body, mesh=mesh.jax, in_specs=in_spec, out_specs=out_spec)
    return jax.jit(mapped)


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


def moved(function, mesh, x):
    """Kind, axes and bytes of every collective in the compiled program, in order."""
    rows = collectives(function.lower(x).compile(), mesh).rows
    return [(row.kind, row.axes, row.nbytes) for row in rows]


def numbers(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


# Every block of x, by rank along dp, is x[rank]; along (dp, tp) it is x[dp, tp].

REDUCTIONS = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}


# --- in a manual region


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


def test_a_barrier_gives_back_what_it_holds_and_makes_everyone_meet(dp_mesh):
    def body(tree):
        return dist.barrier(tree)

    mapped = in_region(dp_mesh, body, P("dp"), P("dp"))
    held = mapped({"a": numbers(8)})
    np.testing.assert_array_equal(held["a"], numbers(8))
    assert moved(mapped, dp_mesh, {"a": numbers(8)}) == [("all-reduce", ("dp",), 4)]


def test_a_barrier_may_wait_along_one_axis(grid_mesh):
    def body(block):
        return dist.barrier(block, "tp")

    mapped = in_region(grid_mesh, body, P("dp"), P("dp"))
    assert moved(mapped, grid_mesh, numbers(2)) == [("all-reduce", ("tp",), 4)]


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


# --- on global arrays


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


def test_outside_a_region_a_barrier_waits_for_the_value():
    x = jnp.ones(3) * 2
    assert dist.barrier(x) is x
    assert dist.barrier() is None


# --- mistakes


def message_of(kind, call, *args, **kwargs):
    with pytest.raises(kind) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def test_an_unknown_axis_comes_with_a_guess(grid_mesh):
    x = on(grid_mesh, numbers(8), "dp")
    assert message_of(UnknownAxisError, dist.all_reduce, x, "dpp") == (
        "[T103] the mesh has no axis 'dpp'\n"
        "  got: dp × tp mesh, 2 × 4\n"
        "  fix: did you mean 'dp'? Known: 'dp', 'tp'\n"
        "  docs: docs/errors/T103.md"
    )


def test_an_unknown_axis_in_a_region_comes_with_a_guess(grid_mesh):
    region = in_region(grid_mesh, lambda x: dist.all_gather(x, "ttp"), P("tp"), P())
    assert message_of(UnknownAxisError, region, numbers(8)) == (
        "[T103] the mesh has no axis 'ttp'\n"
        "  got: this region is manual over 'dp', 'tp'\n"
        "  fix: did you mean 'tp'? Known: 'dp', 'tp'\n"
        "  docs: docs/errors/T103.md"
    )


def test_an_axis_that_is_not_manual_is_named(grid_mesh):
    mapped = jax.shard_map(
        lambda x: dist.all_reduce(x, "dp"),
        mesh=grid_mesh.jax,
        in_specs=P("tp"),
        out_specs=P("tp"),
        axis_names={"tp"},
    )
    assert message_of(CollectiveError, jax.jit(mapped), numbers(8)) == (
        "[T206] mesh axis 'dp' is not manual here\n"
        "  got: this region is manual over 'tp'\n"
        "  fix: the compiler sees to the other axes by itself: name a manual one\n"
        "  docs: docs/errors/T206.md"
    )


def test_an_indivisible_block_shows_the_arithmetic(grid_mesh):
    x = on(grid_mesh, numbers(12, 6), "dp")
    assert message_of(ShardDivisibilityError, dist.scatter, x, "tp", dim=0) == (
        "[T201] a block cannot be divided evenly over mesh axes ('tp',)\n"
        "  got: block of shape (6, 6), dim 0 = 6, axis size 4\n"
        "  fix: make dim 0 of the block 4 or 8, or use another dim\n"
        "  docs: docs/errors/T201.md"
    )
    for call in (
        lambda: dist.reduce_scatter(x, "tp", dim=1),
        lambda: dist.all_to_all(x, "tp", split_dim=1, concat_dim=0),
    ):
        message_of(ShardDivisibilityError, call)


def test_all_gather_of_an_array_that_is_not_split_needs_a_dim(grid_mesh):
    x = on(grid_mesh, numbers(8, 2), "dp")
    assert message_of(CollectiveError, dist.all_gather, x, "tp") == (
        "[T206] mesh axes ('tp',) split no dim of this array\n"
        f"  got: shape (8, 2), layout {P('dp')}\n"
        "  fix: say along which dim, with dim=\n"
        "  docs: docs/errors/T206.md"
    )


def test_a_dim_that_is_not_there(grid_mesh):
    x = on(grid_mesh, numbers(8, 2), "dp")
    assert message_of(DimError, dist.all_gather, x, "dp", dim=2) == (
        "[T203] the operand has no dim 2\n"
        "  got: shape (8, 2)\n"
        "  fix: use a dim from -2 to 1\n"
        "  docs: docs/errors/T203.md"
    )
    scalar = on(grid_mesh, np.float32(3))
    message = message_of(DimError, dist.gather, scalar, "dp")
    assert "fix: reshape the scalar to (1,) first" in message


def test_a_scalar_that_would_differ_from_device_to_device(grid_mesh):
    scalar = on(grid_mesh, np.float32(3))
    message = message_of(CollectiveError, dist.send, scalar, "dp", 0, 1)
    assert "fix: reshape the scalar to (1,) first" in message


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_that_is_not_there(grid_mesh, rank):
    x = on(grid_mesh, numbers(4), "tp")
    assert message_of(CollectiveError, dist.broadcast, x, "tp", root=rank) == (
        f"[T206] mesh axes ('tp',) have no rank {rank}\n"
        "  got: 4 devices along them\n"
        "  fix: use a rank from 0 to 3\n"
        "  docs: docs/errors/T206.md"
    )


@pytest.mark.parametrize(
    ("source", "destination"), [([0, 1], [2]), ([0, 0], [1, 2]), ([0, 1], [2, 2])]
)
def test_ranks_that_do_not_pair_up(grid_mesh, source, destination):
    x = on(grid_mesh, numbers(4), "tp")
    message = message_of(CollectiveError, dist.send, x, "tp", source, destination)
    assert f"got: sources {source}, destinations {destination}" in message


def test_reductions_that_do_not_exist(dp_mesh):
    x = on(dp_mesh, numbers(8), "dp")
    assert "op 'prod'" in message_of(CollectiveError, dist.all_reduce, x, "dp", "prod")
    assert "op 'max'" in message_of(
        CollectiveError, dist.reduce_scatter, x, "dp", op="max"
    )
    bools = on(dp_mesh, numbers(8) > 2, "dp")
    assert "op='max' for any" in message_of(
        CollectiveError, dist.all_reduce, bools, "dp"
    )
    integers = on(dp_mesh, np.arange(8, dtype=np.int32), "dp")
    assert "cast to f32 first" in message_of(
        CollectiveError, dist.all_reduce, integers, "dp", "mean"
    )


@pytest.mark.parametrize("axis", [(), ("dp", "dp")])
def test_axes_are_some_and_different(grid_mesh, axis):
    x = on(grid_mesh, numbers(8), "dp")
    message = message_of(CollectiveError, dist.all_reduce, x, axis)
    assert message.startswith("[T206]")


def test_an_array_on_no_mesh_needs_an_open_one():
    message = message_of(NoMeshError, dist.all_reduce, np.ones(3, np.float32), "dp")
    assert message.startswith("[T106] a collective needs a mesh")


def test_a_traced_array_that_hides_its_layout_is_refused(dp_mesh):
    x = on(dp_mesh, numbers(8), "dp")
    message = message_of(
        CollectiveError, jax.jit(lambda x: dist.all_reduce(x, "dp")), x
    )
    assert message == (
        "[T206] a collective cannot see how this traced array is split\n"
        "  got: float32[8], traced by a transformation that hides layouts\n"
        "  fix: call it inside @op.kernel, where every device has its own block\n"
        "  docs: docs/errors/T206.md"
    )


def test_barriers_that_mean_nothing(dp_mesh):
    assert "leave axis out" in message_of(CollectiveError, dist.barrier, None, "dp")

    def body(x):
        dist.barrier()
        return x

    region = in_region(dp_mesh, body, P("dp"), P("dp"))
    assert "x = barrier(x)" in message_of(CollectiveError, region, numbers(8))
