# SPDX-License-Identifier: Apache-2.0
"""The parameters of JAX's primitives, read by meaning from programs of this JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tessera.jax_compat import jaxprs, primitives

A = jnp.ones((2, 3))
SIDES = jnp.ones((4, 5))


def equation(function, *args, name=""):
    """The last equation of a function, or the last one of a primitive."""
    found = jaxprs.equations(jax.make_jaxpr(function)(*args))
    return [e for e in found if name in ("", e.primitive.name)][-1]


def test_loops_and_branches():
    loop = equation(lambda x: lax.scan(lambda c, _: (c + x, c), x, length=7), 1.0)
    assert primitives.scan_length(loop) == 7
    assert primitives.scan_options(loop) == {
        "length": 7,
        "reverse": False,
        "unroll": 1,
    }
    assert len(jaxprs.outputs(primitives.body(loop))) == 2

    def until(x, y):
        return lax.while_loop(lambda c: c < x, lambda c: c * y + y, 0.0)

    whiles = primitives.while_loop(equation(until, 1.0, 2.0))
    assert whiles[2:] == (1, 1)
    assert [len(jaxprs.inputs(program)) for program in whiles[:2]] == [2, 2]

    choice = equation(lambda x: lax.cond(x > 0, jnp.sin, jnp.cos, x), 1.0)
    assert len(primitives.branches(choice)) == 2
    assert primitives.scan_length(choice) is None


def test_regions_layouts_and_axes():
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("x", "y"))

    def block(a):
        return lax.psum(a, "x")

    mapped = jax.shard_map(
        block, mesh=mesh, in_specs=PartitionSpec("x"), out_specs=PartitionSpec()
    )
    call = equation(mapped, A)
    region = primitives.region(call)
    assert (region.in_specs, region.out_specs) == (
        (PartitionSpec("x"),),
        (PartitionSpec(),),
    )
    assert (region.axes, region.num_devices) == ({"x", "y"}, 1)
    (total,) = jaxprs.equations(primitives.body(call))
    assert primitives.axis_names(total) == {"x"}

    layout = NamedSharding(mesh, PartitionSpec("x"))
    held = equation(lambda a: lax.with_sharding_constraint(a, layout), A)
    assert primitives.constraint(held) == primitives.layout(held) == layout
    assert primitives.meshes(held) == [mesh]
    assert primitives.constraint(total) is None
    jitted = jax.jit(jnp.sin, in_shardings=layout)
    assert primitives.declares_layouts(equation(jitted, A))
    assert not primitives.declares_layouts(equation(jax.jit(jnp.sin), A))


def test_dims_of_matmuls():
    product = equation(lambda a, b: jnp.einsum("bij,bkj->bik", a, b), *2 * [A[None]])
    assert primitives.dot_dims(product) == (((2,), (2,)), ((0,), (0,)))
    assert not primitives.is_product_split(product)
    mesh = jax.make_mesh((1,), ("x",), (jax.sharding.AxisType.Explicit,))
    for spec, is_split in (
        (PartitionSpec(None, "x"), True),
        (PartitionSpec(None, unreduced={"x"}), True),
        (PartitionSpec(None, None), False),
    ):
        layout = {"out_sharding": NamedSharding(mesh, spec)}
        declared = product.replace(params=product.params | layout)
        assert primitives.is_product_split(declared) is is_split
    wide = primitives.bind_matmul(product, 2 * [A[None]], jnp.dtype(jnp.float32))
    np.testing.assert_array_equal(wide[0], A @ A.T)

    ragged = equation(lax.ragged_dot, A, jnp.ones((2, 3, 4)), jnp.array([1, 1]))
    assert primitives.dot_dims(ragged).contracted == ((1,), (1,))
    assert primitives.ragged_dims(ragged) == (0, (0,))


def test_dims_of_a_convolution():
    def convolve(image, kernel):
        return lax.conv_general_dilated(image, kernel, (2, 1), [(1, 1), (0, 0)])

    image, kernel = jnp.ones((1, 1, 6, 6)), jnp.ones((1, 1, 3, 3))
    found = primitives.convolution(equation(convolve, image, kernel))
    assert found.dims.lhs_spec[0] == 0
    assert found[1:] == ((2, 1), ((1, 1), (0, 0)), (1, 1), (1, 1), 1)


@pytest.mark.parametrize(
    ("function", "read", "expected"),
    [
        (lambda a: jnp.transpose(a), primitives.permutation, (1, 0)),
        (
            lambda a: lax.broadcast_in_dim(a, (4, 2, 3), (1, 2)),
            primitives.broadcast_dims,
            (1, 2),
        ),
        (lambda a: lax.squeeze(a[:1], (0,)), primitives.removed_dims, (0,)),
        (lambda a: a.sum(1), primitives.removed_dims, (1,)),
        (jnp.sin, primitives.removed_dims, None),
        (lambda a: lax.cumsum(a, 1), primitives.dim_along, 1),
        (lambda a: lax.sort(a, dimension=0), primitives.dim_along, 0),
        (lambda a: lax.top_k(a, 2)[0], primitives.dim_along, 1),
        (lambda a: lax.concatenate([a, a], 1), primitives.dim_along, 1),
        (lambda a: lax.rev(a, (1,)), primitives.reversed_dims, (1,)),
        (
            lambda a: lax.pad(a, 0.0, [(0, 1, 0), (0, 0, 0)]),
            primitives.padding,
            ((0, 1, 0), (0, 0, 0)),
        ),
        (
            lambda a: lax.reduce_window(a, 0.0, lax.add, (2, 3), (1, 1), "VALID"),
            primitives.window_size,
            6,
        ),
        (lambda a: lax.integer_pow(a, 3), primitives.exponent, 3),
        (jnp.square, primitives.exponent, 2),
        (lambda a: lax.reduce_precision(a, 5, 10), primitives.mantissa_bits, 10),
        (lambda a: checkpoint_name(a, "q"), primitives.checkpoint_name, "q"),
    ],
)
def test_what_one_parameter_says(function, read, expected):
    assert read(equation(function, A)) == expected


def test_indices_of_gathers_and_scatters():
    def pick(a):
        return a.at[jnp.array([1])].get(mode="fill", fill_value=0.0)

    found = equation(pick, A, name="gather")
    assert primitives.gather_dims(found) == ((1, 3), (0,), ())
    assert primitives.indexed_dims(found) == (0,)
    assert primitives.fills_in(found)

    added = equation(lambda a: a.at[1].add(1.0), A, name="scatter-add")
    assert primitives.indexed_dims(added) == (0,)
    values = [A.astype(jnp.bfloat16), jnp.array([1]), jnp.ones(3, jnp.bfloat16)]
    assert primitives.bind_scatter_add(added, values).dtype == jnp.bfloat16


def test_parameters_are_compared_but_for_sizes():
    def halves(a):
        return lax.cumsum(a.reshape(-1), 0)

    one, other = (equation(halves, a, name="cumsum") for a in (A, SIDES))
    assert primitives.have_same_parameters(one, other)
    other = equation(lambda a: lax.cumsum(a, 1), A)
    assert not primitives.have_same_parameters(one, other)


def test_calls_come_with_their_operands():
    def run(x, y):
        return lax.while_loop(lambda c: c < x, lambda c: c * y, 0.5)

    loop = equation(run, 1.0, 2.0)
    condition, body = primitives.calls_with_operands(loop)
    assert condition[1] == [loop.invars[0], loop.invars[2]]
    assert body[1] == loop.invars[1:]


def test_a_rematerialized_call_and_a_closed_over_value_are_recognized():
    def loss(x):
        return jax.checkpoint(lambda y: jnp.sin(jnp.sin(y)))(x)

    program = jax.make_jaxpr(jax.grad(loss))(1.0)
    assert any(map(primitives.is_rematerialization, jaxprs.equations(program)))
    assert primitives.num_closed_over(equation(jnp.sin, 1.0)) == 0
