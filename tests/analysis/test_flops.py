# SPDX-License-Identifier: Apache-2.0
import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from tessera.analysis.flops import Flops, count
from tessera.mesh import Mesh


def flops(function, *arguments):
    return count(jax.make_jaxpr(function)(*arguments))


def ones(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


SQUARE = ones(8, 8)
PRODUCT = 2 * 8**3


def test_a_matmul_is_two_per_product():
    assert flops(jnp.matmul, ones(3, 5), ones(5, 7)) == Flops(matmul=2 * 3 * 5 * 7)


def test_batch_dims_multiply():
    product = functools.partial(jnp.einsum, "bij,bjk->bik")
    assert flops(product, ones(4, 3, 5), ones(4, 5, 7)).matmul == 4 * 2 * 3 * 5 * 7


def test_several_contracting_dims_are_one_depth():
    product = functools.partial(jnp.einsum, "bsd,bse->de")
    assert flops(product, ones(4, 6, 3), ones(4, 6, 5)).matmul == 2 * 24 * 3 * 5


def test_a_gradient_has_two_matmuls_for_one():
    def loss(w, x):
        return jnp.sum((x @ w) ** 2)

    found = flops(jax.value_and_grad(loss, argnums=(0, 1)), SQUARE, SQUARE)
    assert found.matmul == 3 * PRODUCT


def test_what_nobody_reads_is_not_counted():
    # The gradient of a sum does not need the product itself.
    found = flops(jax.grad(lambda w, x: jnp.sum(x @ w)), SQUARE, SQUARE)
    assert found.matmul == PRODUCT


def convolution(x, k, **options):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, k, dimension_numbers=numbers, **options)


@pytest.mark.parametrize(
    ("image", "kernel", "options"),
    [
        ((2, 8, 8, 3), (3, 3, 3, 4), {"padding": "VALID", "window_strides": (1, 1)}),
        ((2, 8, 7, 3), (3, 2, 3, 4), {"padding": "SAME", "window_strides": (2, 1)}),
        (
            (2, 8, 8, 6),
            (3, 3, 3, 4),
            {"padding": "SAME", "window_strides": (1, 1), "feature_group_count": 2},
        ),
        (
            (2, 9, 9, 3),
            (3, 3, 3, 4),
            {"padding": "SAME", "window_strides": (1, 1), "rhs_dilation": (2, 2)},
        ),
        (
            (2, 5, 5, 3),
            (3, 3, 3, 4),
            {
                "padding": ((1, 2), (0, 1)),
                "window_strides": (1, 1),
                "lhs_dilation": (2, 3),
            },
        ),
    ],
)
def test_a_convolution_counts_as_xla_counts_it(image, kernel, options):
    convolve = functools.partial(convolution, **options)
    costs = jax.jit(convolve).lower(ones(*image), ones(*kernel)).compile()
    expected = costs.cost_analysis()["flops"]
    assert flops(convolve, ones(*image), ones(*kernel)).matmul == expected


def test_a_convolutions_gradients_cost_what_it_costs():
    convolve = functools.partial(convolution, padding="SAME", window_strides=(2, 2))
    image, kernel = ones(2, 8, 8, 3), ones(3, 3, 3, 4)
    once = flops(convolve, image, kernel).matmul

    def loss(x, k):
        return jnp.sum(convolve(x, k) ** 2)

    found = flops(jax.value_and_grad(loss, argnums=(0, 1)), image, kernel)
    assert found.matmul == 3 * once


def test_a_ragged_matmul_has_each_row_once_in_both_directions():
    sizes = jnp.array([2, 3, 3], jnp.int32)

    def loss(x, w):
        return jnp.sum(lax.ragged_dot(x, w, sizes) ** 2)

    x, w = ones(8, 4), ones(3, 4, 5)
    once = 2 * 8 * 4 * 5
    assert flops(loss, x, w).matmul == once
    found = flops(jax.value_and_grad(loss, argnums=(0, 1)), x, w)
    assert found.matmul == 3 * once


def test_elementwise_operations_are_one_per_element():
    assert flops(lambda x: jnp.tanh(x) * x + 1.0, SQUARE) == Flops(other=3 * 64)


def test_reductions_are_one_per_element_read():
    assert flops(lambda x: jnp.sum(x), SQUARE) == Flops(other=64)
    assert flops(lambda x: lax.cumsum(x), SQUARE) == Flops(other=64)


def test_moving_data_is_free():
    def moved(x):
        x = jnp.reshape(x.T, (4, 16))[1:3, ::2].astype(jnp.bfloat16)
        return jnp.concatenate([x, x])

    assert flops(moved, SQUARE) == Flops()


def test_adding_at_indices_counts_what_is_added():
    def add(x, update):
        return x.at[jnp.array([1, 2], jnp.int32)].add(update, mode="drop")

    added = flops(add, SQUARE, ones(2, 8))
    assert added.other - flops(lambda x: x, SQUARE).other >= 16
    assert added.other < 16 + 16


def test_a_scan_counts_its_length():
    def scanned(x):
        return lax.scan(lambda c, _: (jnp.tanh(c @ x), None), x, None, length=5)[0]

    assert flops(scanned, SQUARE) == Flops(matmul=5 * PRODUCT, other=5 * 64)


def test_a_loop_of_unknown_length_counts_once_and_is_flagged():
    def until(x):
        return lax.while_loop(lambda y: y[0, 0] < 9.0, lambda y: y @ x, x)

    found = flops(until, SQUARE)
    assert (found.matmul, found.unknown_loops) == (PRODUCT, 1)
    assert found.as_text().endswith("; 1 loops of unknown length count once")


def test_a_branch_counts_as_its_dearest_side():
    def branch(x):
        return lax.cond(x[0, 0] > 0, lambda y: y @ y @ y, lambda y: y @ y, x)

    assert flops(branch, SQUARE).matmul == 2 * PRODUCT


@jax.custom_vjp
def custom(x):
    return x @ x


custom.defvjp(lambda x: (x @ x, x), lambda x, g: (g @ x.T + x.T @ g,))


@pytest.mark.parametrize(
    ("function", "products"),
    [
        (jax.jit(lambda x: x @ x), 1),
        (custom, 1),
        (jax.value_and_grad(lambda x: jnp.sum(custom(x) ** 2)), 3),
        (jax.checkpoint(lambda x: x @ x), 1),
        # The backward recomputes the first product of the two.
        (
            jax.value_and_grad(
                jax.checkpoint(lambda x: jnp.sum(jnp.sin(jnp.sin(x @ x) @ x)))
            ),
            2 + 2 + 4,
        ),
        (jax.vmap(lambda x: jnp.outer(x, x) @ x), 1),
    ],
)
def test_nested_programs_are_counted(function, products):
    assert flops(function, SQUARE).matmul == products * PRODUCT


def test_a_manual_region_counts_for_each_device_of_its_axes():
    mesh = Mesh(["dp", "tp"], devices=range(8), shape=[2, 4])

    def local(x, w):
        return lax.psum(x @ w, "tp")

    specs = (PartitionSpec("dp", "tp"), PartitionSpec("tp"))
    region = jax.shard_map(
        local, mesh=mesh.jax, in_specs=specs, out_specs=PartitionSpec("dp")
    )
    found = flops(region, ones(16, 32), ones(32, 8))
    assert found == flops(jnp.matmul, ones(16, 32), ones(32, 8))


def test_a_region_that_is_manual_over_one_axis_has_the_others_whole():
    mesh = Mesh(["dp", "tp"], devices=range(8), shape=[2, 4])
    region = jax.shard_map(
        lambda x: x @ x.T,
        mesh=mesh.jax,
        in_specs=PartitionSpec("dp"),
        out_specs=PartitionSpec("dp"),
        axis_names={"dp"},
    )
    # Two blocks of 8 rows, each against itself.
    assert flops(jax.jit(region), ones(16, 4)).matmul == 2 * (2 * 8 * 8 * 4)


def test_the_text_names_both_parts():
    assert Flops(2_500_000, 10).as_text() == "FLOPs: 2.50 M in matmuls, 10 in the rest"
