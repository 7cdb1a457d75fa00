# SPDX-License-Identifier: Apache-2.0
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tessera.analysis.declared import declared_layouts

SHAPE = {"dp": 2, "tp": 4}


def found_in(function, *shapes):
    structs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    found = declared_layouts(jax.make_jaxpr(function)(*structs), SHAPE)
    return sorted((sorted(each.axes), each.size, len(each.lines)) for each in found)


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
    assert found_in(body, (8, 16)) == [(["dp", "tp"], 8 * 16 // 8, 3)]


def test_what_only_changes_the_form_of_an_array_is_looked_through(grid_mesh):
    def body(x):
        y = jnp.sin(x)
        y = y.reshape(128)
        y = held(y, grid_mesh, "tp")
        y = y.astype(jnp.bfloat16)
        return jnp.cos(y)

    assert found_in(body, (8, 16)) == [(["tp"], 32, 5)]


def test_layouts_inside_loops_and_backward_passes_are_found(grid_mesh):
    def loss(x):
        def layer(x, _):
            return held(jnp.sin(x), grid_mesh, "dp"), None

        return jnp.sum(lax.scan(layer, x, None, length=2)[0])

    found = declared_layouts(
        jax.make_jaxpr(jax.grad(loss))(jax.ShapeDtypeStruct((8, 16), jnp.float32)),
        SHAPE,
    )
    assert {(each.axes, each.size) for each in found} == {(frozenset(["dp"]), 64)}
    assert len(found) >= 1


def test_a_manual_region_declares_its_arguments_and_results(grid_mesh):
    def body(x, w):
        return jax.shard_map(
            lambda x, w: x @ w,
            mesh=grid_mesh.jax,
            in_specs=(P("dp"), P(None, "tp")),
            out_specs=P("dp", "tp"),
        )(x, w)

    found = found_in(body, (8, 16), (16, 4))
    assert [(axes, size) for axes, size, _ in found] == [
        (["dp"], 64),
        (["dp", "tp"], 4),
        (["tp"], 16),
    ]
