# SPDX-License-Identifier: Apache-2.0
import inspect

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tessera.analysis.sharding_constraints import declared_layouts


def declared_in(function, *shapes):
    structs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return declared_layouts(jax.make_jaxpr(function)(*structs))


def found_in(function, *shapes):
    found = declared_in(function, *shapes)
    return sorted((sorted(each.axes), each.shape, len(each.lines)) for each in found)


def operands_in(function, *shapes):
    """Shapes of the arrays that may be moved, the dims in question, and their axes."""
    found = declared_in(function, *shapes)
    return {
        (each.shape, tuple(sorted(each.dims)), *sorted(each.axes)) for each in found
    }


def lines_of(function, *texts):
    source, first = inspect.getsourcelines(function)
    return {
        f"{inspect.getsourcefile(function)}:{first + number}"
        for number, line in enumerate(source)
        if any(text in line for text in texts)
    }


def held(x, mesh, *spec):
    return lax.with_sharding_constraint(x, NamedSharding(mesh.compile_mesh, P(*spec)))


def test_a_constraint_has_its_axes_its_size_and_the_lines_beside_it(grid_mesh):
    def body(x):
        y = jnp.sin(x)
        y = held(
            y,
            grid_mesh,
            "dp",
            "tp",
        )
        return jnp.cos(y)

    # sin, cos, and the constraint itself, whose line is that of ``held``.
    assert found_in(body, (8, 16)) == [(["dp", "tp"], (8, 16), 3)]


def test_what_only_changes_the_form_of_an_array_is_looked_through(grid_mesh):
    def body(x):
        y = jnp.sin(x)
        y = y.reshape(128)
        y = held(y, grid_mesh, "tp")
        y = y.astype(jnp.bfloat16)
        return jnp.cos(y)

    found = found_in(body, (8, 16))
    assert (["tp"], (128,), 5) in found
    assert {lines for _, _, lines in found} == {5}


def test_layouts_inside_loops_and_backward_passes_are_found(grid_mesh):
    def loss(x):
        def layer(x, _):
            return held(jnp.sin(x), grid_mesh, "dp"), None

        return jnp.sum(lax.scan(layer, x, None, length=2)[0])

    found = declared_in(jax.grad(loss), (8, 16))
    assert {(each.axes, each.shape) for each in found} == {(frozenset(["dp"]), (8, 16))}


def test_a_manual_region_declares_its_arguments_and_results(grid_mesh):
    def body(x, w):
        return jax.shard_map(
            lambda x, w: x @ w,
            mesh=grid_mesh.jax,
            in_specs=(P("dp"), P(None, "tp")),
            out_specs=P("dp", "tp"),
        )(x, w)

    found = found_in(body, (8, 16), (16, 4))
    assert [(axes, shape) for axes, shape, _ in found] == [
        (["dp"], (8, 16)),
        (["dp", "tp"], (8, 4)),
        (["tp"], (16, 4)),
    ]


# --- the operands of what computes a value


def test_the_rows_of_a_product_are_rows_of_its_operand_and_the_inner_dim_is_neither(
    grid_mesh,
):
    def body(x, w):
        return held(x @ w, grid_mesh, "dp", "tp")

    assert operands_in(body, (8, 16), (16, 4)) == {
        ((8, 4), (0, 1), "dp", "tp"),
        ((8, 16), (0,), "dp"),
        ((16, 4), (1,), "tp"),
    }


def test_dims_are_followed_through_what_changes_their_order_and_their_number(grid_mesh):
    def body(x, w):
        y = jnp.einsum("bsd,de->bse", x, w)  # [2, 3, 4]
        y = y.transpose(2, 0, 1).reshape(4, 6)[None]
        return held(y, grid_mesh, None, "tp", "dp")

    found = operands_in(body, (2, 3, 5), (5, 4))
    assert ((5, 4), (1,), "tp") in found
    assert not any(shape == (2, 3, 5) for shape, *_ in found)


def test_a_sum_is_not_of_the_dims_that_it_adds_up(grid_mesh):
    def body(x):
        return held(x.sum(1), grid_mesh, "dp")

    assert operands_in(body, (8, 16)) == {((8,), (0,), "dp"), ((8, 16), (0,), "dp")}


# --- nested programs


@jax.jit
def doubled(x):
    y = x + 1.0
    return y * 2.0


def test_what_computes_a_value_is_found_inside_nested_programs(grid_mesh):
    def remade(x):
        z = jnp.sin(x)
        return jnp.exp(z)

    def body(x):
        y = jax.checkpoint(remade)(doubled(x))
        return held(y, grid_mesh, "dp")

    found = min(declared_in(body, (8, 16)), key=lambda each: len(each.lines))
    assert found.lines >= lines_of(remade, "jnp.exp")
    assert not found.lines & lines_of(remade, "jnp.sin")

    def in_a_branch(x):
        y = lax.cond(x.sum() > 0, remade, doubled, x)
        return held(y, grid_mesh, "dp")

    lines = next(iter(declared_in(in_a_branch, (8, 16)))).lines
    assert lines >= lines_of(remade, "jnp.exp") | lines_of(doubled.__wrapped__, "* 2.0")


def test_what_reads_a_value_is_found_inside_nested_programs(grid_mesh):
    def body(x):
        return doubled(held(x, grid_mesh, "dp"))

    (found,) = declared_in(body, (8, 16))
    assert found.lines >= lines_of(doubled.__wrapped__, "x + 1.0")


def test_a_value_of_a_loop_is_computed_before_it_and_by_each_turn(grid_mesh):
    def layer(x, _):
        y = held(x, grid_mesh, "dp")
        return jnp.tanh(y), None

    def body(x):
        z = jnp.sin(x)
        return lax.scan(layer, z, None, length=2)[0]

    (found,) = declared_in(body, (8, 16))
    wanted = lines_of(body, "jnp.sin") | lines_of(layer, "jnp.tanh")
    assert found.lines >= wanted


def test_a_line_is_the_users_where_a_library_computes(grid_mesh):
    def body(x):
        y = optax.apply_updates(x, x)
        return held(y, grid_mesh, "dp")

    (found,) = declared_in(body, (8, 16))
    assert found.lines >= lines_of(body, "apply_updates")
    assert not any("optax" in line for line in found.lines)
