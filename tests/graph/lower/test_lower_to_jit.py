# SPDX-License-Identifier: Apache-2.0
"""A graph lowered to jax.jit: what it takes and gives, and that layouts are checked."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera.errors import ArgumentError, LayoutMismatchError
from tessera.graph.lower.lower_to_jit import (
    check_layouts,
    jitted,
    lower,
    options_of,
)
from tessera.jax_compat.workarounds import correct_options
from tessera.shard import tensor
from tessera.tracing.scope import round_alike

X = jnp.arange(32.0).reshape(8, 4)


def lowered(traced):
    return lower(traced.origin, traced.graph, traced.call)


def program(traced):
    return jitted(traced.origin, traced.graph, traced.call)


def test_the_program_takes_arguments_parameters_and_captured_arrays():
    table = tensor((4,), init="ones", name="table")
    held = jnp.full(4, 2.0)
    traced = ts.function(lambda tree, y: tree["a"] * y + table * held).trace(
        {"a": X}, X
    )
    (result,) = program(traced)([X], [X], (jnp.ones(4),), (held,))
    np.testing.assert_array_equal(result, X * X + 2.0)


def test_an_argument_comes_as_the_list_of_its_arrays():
    traced = ts.function(lambda tree: tree["a"] * tree["n"]).trace({"a": X, "n": 3})
    (result,) = program(traced)([X], (), ())
    np.testing.assert_array_equal(result, X * 3)


def test_a_result_is_the_list_of_its_arrays():
    traced = ts.function(lambda x: {"x": x, "y": (x + 1, None), "name": "f"}).trace(X)
    array, other = program(traced)([X], (), ())
    np.testing.assert_array_equal(other, array + 1)
    expected = {"x": array, "y": (other, None), "name": "f"}
    assert traced.origin.unflatten([array, other]) == expected


def test_the_module_is_named_after_the_function():
    def my_step(x):
        return x * 2.0

    assert "@jit_my_step" in lowered(ts.function(my_step).trace(X)).as_text()


def test_declared_layouts_are_those_of_the_module(grid_mesh):
    step = ts.function(
        lambda x, y: x @ y,
        mesh=grid_mesh,
        in_specs={"x": P("dp")},
        out_specs=P("dp", "tp"),
    )
    compiled = lowered(step.trace(X, X.T)).compile()
    (x,), (y,) = compiled.input_shardings[0][:2]
    assert (x.spec, y.spec) == (P("dp"), P())
    assert compiled.output_shardings[0].spec == P("dp", "tp")


def rounding_alike(function):
    def step(x):
        round_alike()
        return function(x)

    return ts.function(step)


def test_a_step_that_rounds_alike_computes_products_as_they_are_written():
    def scaled(x):
        return x / 3.0 * 0.1 * 0.7

    def operations(function):
        text = function.compile(X).as_text()
        return text.count(" divide("), text.count(" multiply(")

    assert operations(rounding_alike(scaled)) == (1, 2)
    assert operations(ts.function(scaled)) != (1, 2)


@pytest.mark.parametrize(
    ("platform", "options"),
    [
        ("cpu", {"xla_disable_hlo_passes": "cse,algsimp"}),
        ("gpu", {"xla_disable_hlo_passes": "cse", "xla_gpu_deterministic_ops": True}),
        ("tpu", {"xla_disable_hlo_passes": "cse"}),
    ],
)
def test_options_that_make_it_so_go_beside_those_of_a_user(
    platform, options, monkeypatch
):
    graph = rounding_alike(jnp.sin).trace(X).graph
    chosen = ("xla_disable_hlo_passes", "cse")
    graph = replace(graph, plan=replace(graph.plan, compiler_options=(chosen,)))
    monkeypatch.setattr(type(graph), "platform", property(lambda _: platform))
    options |= correct_options(platform) | {"xla_allow_excess_precision": False}
    assert options_of(graph) == options


def test_a_donated_argument_is_aliased_and_gone():
    step = ts.function(lambda state, x: state + x, donate=["state"])
    compiled = step.compile(X, X)
    assert "input_output_alias" in compiled.as_text()
    state = X + 1.0
    step(state, X)
    assert state.is_deleted()
    assert not X.is_deleted()


def test_a_donated_array_that_is_passed_again_is_named():
    step = ts.function(lambda state, x: {"w": state["w"] + x}, donate=["state"])
    state = {"w": X + 1.0}
    new = step(state, X)
    with pytest.raises(ArgumentError, match=r"'state/w' is deleted"):
        step(state, X)
    step(new, X)


def test_a_donated_argument_with_statics_is_gone_too(dp_mesh):
    step = ts.function(
        lambda state, x: state["a"] + x * state["n"],
        donate=["state"],
        mesh=dp_mesh,
        in_specs={"state": P("dp")},
        out_specs=P("dp"),
    )
    state = {"a": jax.device_put(X, NamedSharding(dp_mesh.jax, P("dp"))), "n": 2}
    step(state, X)
    assert state["a"].is_deleted()


# --- the check of what was compiled


def with_declared(graph, name, spec):
    """A graph that claims another layout of one of its values."""

    def changed(values):
        return tuple(replace(v, spec=spec) if v.name == name else v for v in values)

    return replace(graph, inputs=changed(graph.inputs), outputs=changed(graph.outputs))


@pytest.fixture
def compiled_step(grid_mesh):
    step = ts.function(
        lambda x, y, unused: (x + y, y),
        mesh=grid_mesh,
        in_specs={"x": P("dp"), "unused": P("tp")},
        out_specs=P("dp"),
    )
    traced = step.trace(X, X, X)
    return traced.graph, lowered(traced).compile()


def test_layouts_as_declared_pass(compiled_step):
    check_layouts(*compiled_step)


def test_every_layout_that_differs_is_listed(compiled_step):
    graph, compiled = compiled_step
    graph = with_declared(graph, "x", P("tp"))
    graph = with_declared(graph, "result/1", P(None, "tp"))
    with pytest.raises(LayoutMismatchError) as caught:
        check_layouts(graph, compiled)
    assert str(caught.value) == (
        "[T205] XLA did not compile '<lambda>' with the declared layouts\n"
        "  got: x: declared P('tp',), compiled P('dp',)\n"
        "  got: result/1: declared P(None, 'tp'), compiled P('dp',)\n"
        "  fix: lay the arrays out as compiled, or report this with the program\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T205.html"
    )


def test_an_input_that_the_program_drops_has_no_layout_to_check(compiled_step):
    graph, compiled = compiled_step
    check_layouts(with_declared(graph, "unused", P("dp")), compiled)


def test_without_a_mesh_there_is_nothing_to_check():
    step = ts.function(lambda x: x)
    check_layouts(step.trace(X).graph, step.lower(X).jax.compile())


def test_prng_keys_may_be_laid_out(dp_mesh):
    step = ts.function(
        lambda key: jax.random.split(key, 8), mesh=dp_mesh, out_specs=P("dp")
    )
    keys = step(jax.random.key(0))
    assert keys.sharding.spec == P("dp")
    np.testing.assert_array_equal(
        jax.random.key_data(keys),
        jax.random.key_data(jax.random.split(jax.random.key(0), 8)),
    )
