# SPDX-License-Identifier: Apache-2.0
"""What collectives refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tessera as ts
from tessera import dist
from tessera.errors import (
    CollectiveError,
    DimError,
    NoMeshError,
    ShardDivisibilityError,
    UnknownAxisError,
)
from tests.ops.regions import P, in_region, numbers, on


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
        "  docs: https://tessera-spmd.github.io/tessera/errors/T103.html"
    )


def test_an_unknown_axis_in_a_region_comes_with_a_guess(grid_mesh):
    region = in_region(grid_mesh, lambda x: dist.all_gather(x, "ttp"), P("tp"), P())
    assert message_of(UnknownAxisError, region, numbers(8)) == (
        "[T103] the mesh has no axis 'ttp'\n"
        "  got: this region is manual over 'dp', 'tp'\n"
        "  fix: did you mean 'tp'? Known: 'dp', 'tp'\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T103.html"
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
        "  fix: name a manual axis: XLA partitions over the others\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T206.html"
    )


def test_an_indivisible_block_shows_the_arithmetic(grid_mesh):
    x = on(grid_mesh, numbers(12, 6), "dp")
    assert message_of(ShardDivisibilityError, dist.scatter, x, "tp", dim=0) == (
        "[T201] a block cannot be divided evenly over mesh axes ('tp',)\n"
        "  got: block of shape (6, 6), dim 0 = 6, axis size 4\n"
        "  fix: make dim 0 of the block 4 or 8, or use another dim\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T201.html"
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
        "  fix: name a dim, with dim=\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T206.html"
    )


def test_a_dim_that_is_not_there(grid_mesh):
    x = on(grid_mesh, numbers(8, 2), "dp")
    assert message_of(DimError, dist.all_gather, x, "dp", dim=2) == (
        "[T203] the operand has no dim 2\n"
        "  got: shape (8, 2)\n"
        "  fix: use a dim from -2 to 1\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T203.html"
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
        "  docs: https://tessera-spmd.github.io/tessera/errors/T206.html"
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


@pytest.mark.parametrize(
    "call", [dist.all_reduce, dist.all_gather, dist.reduce_scatter, dist.broadcast]
)
def test_a_call_as_of_pytorch_says_how_to_name_the_axis(call):
    assert 'fix: write axis="dp"' in message_of(CollectiveError, call, numbers(8))


@pytest.mark.parametrize("call", [dist.all_reduce, dist.reduce_scatter])
@pytest.mark.parametrize(
    ("slope", "message"),
    [
        (lambda loss, w: ts.grad(loss(w), w), "summed over all devices already"),
        (lambda loss, w: ts.grad(loss)(w), "cannot see how this traced array"),
        (lambda loss, w: jax.grad(loss)(w), "cannot see how this traced array"),
    ],
    ids=["of a value", "of a function", "of jax"],
)
def test_the_gradient_of_a_whole_batch_is_not_summed_again(
    dp_mesh, call, slope, message
):
    """It would be as many times the gradient as there are devices."""

    @ts.function(mesh=dp_mesh)
    @ts.distribute("data_parallel", params="w", batch="x")
    def step(w, x):
        return call(slope(lambda w: jnp.mean((x @ w) ** 2), w), "dp")

    w, x = np.ones((8, 4), np.float32), np.ones((8, 8), np.float32)
    with pytest.raises(CollectiveError, match=message) as caught:
        step.trace(w, x)
    assert caught.value.fix.startswith("leave ")


def test_the_mean_of_the_copies_of_a_gradient_is_the_gradient(dp_mesh):
    @ts.function(mesh=dp_mesh)
    @ts.distribute("data_parallel")
    def step(w, x):
        slope = ts.grad(jnp.mean((x @ w) ** 2), w)
        return slope, dist.all_reduce(slope, "dp", op="mean")

    slope, mean = step(np.ones(4, np.float32), numbers(32).reshape(8, 4))
    np.testing.assert_allclose(mean, slope, rtol=1e-6)


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
        "  fix: leave it out, where the compiler is to insert it, or call it inside "
        "@op.kernel, where every device has its own block\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T206.html"
    )
