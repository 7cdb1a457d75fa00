# SPDX-License-Identifier: Apache-2.0
"""Which collectives a declared layout implies, in programs that XLA compiled."""

import inspect

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera import dist, op
from tessera.analysis.collective_reasons import LAYOUT, SHARDED_STORAGE, SUM, WRITTEN
from tessera.analysis.ledger import collectives

# What was compiled elsewhere has the lines of elsewhere.
pytestmark = pytest.mark.usefixtures("compiled_here")

MEGATRON = {"up": P(None, "tp"), "down": P("tp")}


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


PARAMS = {"up": f32(64, 256), "down": f32(256, 64)}


def ledger(body, mesh, *arguments, out=None, **specs):
    step = ts.function(body, mesh=mesh, in_specs=specs, out_specs=out)
    return step.compile(*arguments).collectives


def essence(found):
    return [(row.kind, row.axes, row.reason) for row in found.rows]


def the_line_of(function, text):
    lines, first = inspect.getsourcelines(function)
    (found,) = [i for i, line in enumerate(lines) if text in line]
    return f"{inspect.getsourcefile(function)}:{first + found}"


def loss(params, x):
    return jnp.sum((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2)


def sgd(params, x):
    gradient = jax.grad(loss)(params, x)
    return {k: params[k] - 0.1 * gradient[k] for k in params}


# --- what layouts imply


def test_sums_over_a_split_batch_and_over_split_weights_are_planned(grid_mesh):
    found = ledger(
        sgd, grid_mesh, PARAMS, f32(32, 64), params=MEGATRON, x=P("dp"), out=MEGATRON
    )
    assert essence(found) == [
        ("all-reduce", ("tp",), SUM),
        ("all-reduce", ("dp",), SUM),
    ]
    assert not found.unplanned
    sent = {axes: total.nbytes for axes, total in found.by_axis().items()}
    assert sent == {("tp",): 16 * 64 * 4, ("dp",): 2 * 64 * 64 * 4}


def test_weights_with_sharded_storage_are_gathered_for_a_split_batch(dp_mesh):
    def held(x):
        return lax.with_sharding_constraint(x, NamedSharding(dp_mesh.jax, P("dp")))

    def step(params, x):
        def loss(params):
            h = held(jnp.tanh(x @ params["up"]))
            return jnp.sum(held(h @ params["down"]) ** 2)

        gradient = jax.grad(loss)(params)
        return {k: params[k] - 0.1 * gradient[k] for k in params}

    specs = {"up": P("dp"), "down": P(None, "dp")}
    found = ledger(
        step, dp_mesh, PARAMS, f32(32, 64), params=specs, x=P("dp"), out=specs
    )
    gathers = [row for row in found.rows if row.kind == "all-gather"]
    assert {row.reason for row in gathers} == {SHARDED_STORAGE}
    assert found.unplanned == ()


def test_stacked_weights_are_gathered_layer_by_layer(dp_mesh):
    def stacked(ups, x):
        # What is computed of a weight alone still is that weight.
        def layer(x, w):
            return jnp.tanh(x @ (1.0 + w)), None

        return jnp.sum(lax.scan(layer, x, ups)[0])

    def step(ups, x):
        return ups - jax.grad(stacked)(ups, x)

    spec = P(None, "dp")
    found = ledger(
        step, dp_mesh, f32(3, 64, 64), f32(32, 64), ups=spec, x=P("dp"), out=spec
    )
    gathers = [row for row in found.rows if row.kind == "all-gather"]
    assert {(row.reason, row.calls) for row in gathers} == {(SHARDED_STORAGE, 3)}
    assert found.unplanned == ()


def test_what_the_program_says_is_planned(dp_mesh):
    @op.kernel
    def total(x):
        return dist.all_reduce(x.sum(), axis="dp")

    found = ledger(total, dp_mesh, f32(16, 4), x=P("dp"))
    assert essence(found) == [("all-reduce", ("dp",), WRITTEN)]


def test_a_change_of_layout_that_the_body_declares_is_planned(grid_mesh):
    def body(x):
        y = jnp.sin(x)
        y = lax.with_sharding_constraint(y, NamedSharding(grid_mesh.jax, P("dp")))
        return jnp.cos(y)

    found = ledger(body, grid_mesh, f32(32, 64), x=P("dp", "tp"), out=P("dp"))
    assert essence(found) == [("all-gather", ("tp",), LAYOUT)]


def whole(x, mesh, *spec):
    return lax.with_sharding_constraint(x, NamedSharding(mesh.compile_mesh, P(*spec)))


def last_constraint(name, mesh):
    """Functions that end with a constraint, after another operation each."""

    def product(w, x):
        y = x @ w
        return lax.with_sharding_constraint(y, NamedSharding(mesh.jax, P()))

    def elementwise(w, x):
        y = jnp.tanh(x @ w)
        z = 2.0 * y
        return lax.with_sharding_constraint(z, NamedSharding(mesh.jax, P()))

    def transposed(w, x):
        y = (x @ w).T
        return lax.with_sharding_constraint(y, NamedSharding(mesh.jax, P()))

    def library(w, x):
        y = jax.nn.gelu(x @ w)
        z = optax.apply_updates(y, y)
        return lax.with_sharding_constraint(z, NamedSharding(mesh.jax, P()))

    @jax.jit
    def inner(w, x):
        y = x @ w
        y = jnp.tanh(y)
        return y

    def nested(w, x):
        y = inner(w, x)
        return lax.with_sharding_constraint(y, NamedSharding(mesh.jax, P()))

    def remade(w, x):
        y = jax.checkpoint(inner)(w, x)
        return lax.with_sharding_constraint(y, NamedSharding(mesh.jax, P()))

    def tree(w, x):
        y = {"a": x @ w, "b": jnp.sin(x)}
        return lax.with_sharding_constraint(y, NamedSharding(mesh.jax, P()))

    return locals()[name]


@pytest.mark.parametrize(
    "name",
    [
        *("product", "elementwise", "transposed", "library"),
        *("nested", "remade", "tree"),
    ],
)
def test_a_result_that_the_last_line_declares_whole_is_planned_at_that_line(
    grid_mesh, name
):
    body = last_constraint(name, grid_mesh)
    found = ledger(
        body, grid_mesh, f32(64, 48), f32(32, 64), w=P(None, "tp"), x=P("dp")
    )
    assert {(row.kind, row.reason) for row in found.rows} == {("all-gather", LAYOUT)}
    assert {row.axes for row in found.rows} == {("dp",), ("tp",)}
    line = the_line_of(body, "with_sharding_constraint")
    assert {row.source for row in found.rows} == {line}


def test_a_dim_that_moves_to_another_axis_as_declared_is_planned(grid_mesh):
    def body(x):
        y = jnp.sin(x)
        return whole(y, grid_mesh, None, "tp")

    found = ledger(body, grid_mesh, f32(64, 64), x=P("tp"))
    assert essence(found) == [("all-to-all", ("tp",), LAYOUT)]


def test_a_gather_of_what_a_product_sums_over_is_not_the_declared_one(grid_mesh):
    """The rows and columns of the result are declared, not what lies between them."""

    def body(w, x):
        h = jnp.tanh(x)
        return whole(h @ w, grid_mesh)

    specs = {"w": P(), "x": P("dp", "tp")}
    found = ledger(body, grid_mesh, f32(64, 48), f32(32, 64), **specs)
    reasons = {row.axes: row.reason for row in found.rows if row.kind == "all-gather"}
    assert reasons[("dp",)] == LAYOUT
    assert reasons.get(("tp",), "") == ""


def test_a_sum_over_an_axis_that_only_a_layout_inside_names_is_planned(grid_mesh):
    def body(x):
        x = whole(x, grid_mesh, "dp", "tp")
        return jnp.sin(x).sum(1)

    found = ledger(body, grid_mesh, f32(32, 64), x=P("dp"))
    assert essence(found) == [("all-reduce", ("tp",), SUM)]


def test_parameters_computed_from_state_that_is_split_are_gathered(dp_mesh):
    def step(w, momentum, x):
        momentum = 0.9 * momentum + jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)
        return w - momentum, momentum

    found = ledger(
        step,
        dp_mesh,
        *(f32(64, 32), f32(64, 32), f32(16, 64)),
        w=P(),
        momentum=P("dp"),
        x=P("dp"),
        out=(P(), P("dp")),
    )
    assert [row.reason for row in found.rows if row.kind == "all-gather"] == [LAYOUT]
    assert found.unplanned == ()


# --- what they do not


@pytest.mark.parametrize("missing", ["up", "down"])
def test_a_missing_spec_shows_up_as_unplanned_with_its_line(grid_mesh, missing):
    specs = {**MEGATRON, missing: P()}
    found = ledger(
        sgd, grid_mesh, PARAMS, f32(32, 64), params=specs, x=P("dp"), out=specs
    )
    (row,) = found.unplanned
    assert (row.kind, row.axes, row.nbytes) == ("all-gather", ("tp",), 64 * 256 * 4)
    assert row.source == the_line_of(sgd, "- 0.1 *")


def test_weights_split_along_the_wrong_dim_show_up(grid_mesh):
    specs = {"up": P(None, "tp"), "down": P(None, "tp")}
    found = ledger(
        sgd, grid_mesh, PARAMS, f32(32, 64), params=specs, x=P("dp"), out=specs
    )
    (row,) = found.unplanned
    assert (row.kind, row.axes) == ("all-gather", ("tp",))
    assert row.source == the_line_of(loss, "jnp.tanh")


def test_a_weight_gathered_for_what_nothing_else_splits_is_unplanned(grid_mesh):
    """Each device of tp computes the same: splitting the weight gained nothing."""

    def body(w, x):
        return x @ jnp.fft.fft(w).real

    found = ledger(body, grid_mesh, f32(64, 64), f32(8, 64), w=P(None, "tp"), x=P("dp"))
    assert essence(found) == [("all-gather", ("tp",), "")]
    assert found.rows[0].source == the_line_of(body, "fft")


def test_a_batch_that_is_gathered_where_its_weights_should_be_shows_up(dp_mesh):
    """Without a constraint between two matmuls the partitioner may choose either."""
    specs = {"up": P("dp"), "down": P(None, "dp")}
    found = ledger(
        sgd, dp_mesh, PARAMS, f32(32, 64), params=specs, x=P("dp"), out=specs
    )
    (row,) = found.unplanned
    assert (row.kind, row.nbytes) == ("all-gather", 32 * 256 * 4)
    assert row.source == the_line_of(loss, "jnp.tanh")


def test_a_gathered_batch_is_unplanned(dp_mesh):
    def body(x, w):
        return (2.0 * x) @ w

    found = ledger(body, dp_mesh, f32(32, 64), f32(64, 8), x=P("dp"), w=P(), out=P())
    assert essence(found) == [("all-gather", ("dp",), "")]
    assert found.rows[0].source == the_line_of(body, "2.0 * x")


def test_a_sum_over_an_axis_that_no_layout_names_is_unplanned(grid_mesh):
    """XLA may share out work over an axis along which all devices hold the same."""

    def body(w, x):
        return x @ w

    found = ledger(body, grid_mesh, f32(64, 64), f32(64, 64), w=P("dp"), x=P("dp"))
    (row,) = [row for row in found.rows if row.kind == "all-reduce"]
    assert (row.axes, row.reason) == (("tp",), "")


def test_a_sum_over_an_axis_that_splits_something_else_is_unplanned(grid_mesh):
    def body(w, x, other):
        return x @ w, jnp.sin(other)

    shapes = f32(64, 64), f32(64, 64), f32(64)
    specs = {"w": P("dp"), "x": P("dp"), "other": P("tp")}
    found = ledger(body, grid_mesh, *shapes, out=(P(), P()), **specs)
    rows = [row for row in found.rows if row.kind == "all-reduce"]
    assert [(row.axes, row.reason) for row in rows] == [(("tp",), "")]


def test_of_the_text_of_a_program_every_sum_is_planned(grid_mesh):
    """Nothing says how its inputs are split."""

    def body(x):
        return x.sum(0)

    step = ts.function(body, mesh=grid_mesh, in_specs={"x": P("dp")})
    text = step.compile(f32(64, 64)).as_text()
    assert essence(collectives(text, grid_mesh)) == [("all-reduce", ("dp",), SUM)]


# --- arrays copied whole


def test_an_array_that_is_copied_whole_to_be_cut_again_is_named(grid_mesh, capfd):
    def body(x):
        y = jnp.sin(x)
        y = lax.with_sharding_constraint(y, NamedSharding(grid_mesh.jax, P(None, "dp")))
        return jnp.cos(y)

    found = ledger(body, grid_mesh, f32(16, 32), x=P("tp"), out=P(None, "dp"))
    (row,) = found.rows
    assert row.copies_whole
    assert not row.is_planned
    assert row.nbytes == 16 * 32 * 4
    assert row.source.startswith(__file__)
    assert "UNPLANNED, whole" in found.as_text()
    assert "whole: copied whole to every device" in found.as_text()
    # XLA says it too, where nobody can act on it.
    assert "Involuntary full rematerialization" in capfd.readouterr().err


def test_a_gathered_table_of_which_a_loop_takes_rows_is_not_one(dp_mesh):
    def body(ws, x):
        def layer(i, x):
            return jnp.tanh(x @ ws[i])

        ws = lax.with_sharding_constraint(ws, NamedSharding(dp_mesh.jax, P()))
        return lax.fori_loop(0, 3, layer, x)

    found = ledger(body, dp_mesh, f32(3, 64, 64), f32(8, 64), ws=P(None, "dp"))
    assert not any(row.copies_whole for row in found.rows)


def test_what_a_kernel_gathers_and_cuts_by_itself_is_written(dp_mesh):
    @op.kernel
    def own_part_of_all(x):
        whole = lax.all_gather(jnp.sin(x), "dp", tiled=True)
        return lax.dynamic_slice_in_dim(whole, lax.axis_index("dp"), 1)

    found = ledger(own_part_of_all, dp_mesh, f32(16, 4), x=P("dp"))
    assert essence(found) == [("all-gather", ("dp",), WRITTEN)]
    assert not found.rows[0].copies_whole
