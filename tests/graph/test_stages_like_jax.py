# SPDX-License-Identifier: Apache-2.0
"""The stages of a call, as ``jax.stages`` has them."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera.errors import ArgumentError, OutsideTraceError
from tessera.tracing import scope

X = jnp.linspace(-1.0, 1.0, 8, dtype=jnp.float32)


def body(tree, y, n=2):
    return {"sum": tree["x"] + y * n, "x": tree["x"]}


def test_a_compiled_program_takes_the_functions_arguments():
    compiled = ts.jit(body).lower({"x": X}, y=X).compile()
    found = compiled({"x": X + 1}, y=X)
    np.testing.assert_allclose(found["sum"], X * 3 + 1, rtol=1e-6)
    static = ts.jit(body).lower({"x": X}, X, 3).compile()
    np.testing.assert_allclose(static({"x": X}, X, 3)["sum"], X * 4, rtol=1e-6)


def test_it_takes_no_static_arguments():
    def scale(state, kind, x, *, power):
        state["kind"] = x.sum()
        return x**power if kind == "power" else x

    scale = ts.jit(scale, static_argnums=1, static_argnames="power")
    compiled = scale.lower({}, "power", X, power=2).compile()
    state = {}
    np.testing.assert_allclose(compiled(state, X), X**2, rtol=1e-6)
    np.testing.assert_allclose(state["kind"], X.sum(), atol=1e-6)
    with pytest.raises(ArgumentError, match="called with other arguments"):
        compiled(state, "power", X)
    with pytest.raises(ArgumentError, match="called with other arguments"):
        compiled(state, X, power=2)


def test_it_takes_no_others():
    compiled = ts.jit(body).lower({"x": X}, X, 3).compile()
    for args, difference in (
        (({"x": X}, X, 4), "n: 4, compiled for 3"),
        (({"x": X}, X[:4], 3), r"y: float32\[4\], compiled for float32\[8\]"),
        (({"x": X}, X.astype(int), 3), r"y: int32\[8\], compiled for float32"),
        (({"z": X}, X, 3), "tree: PyTreeDef"),
        (({"x": X}, X), "arguments: "),
    ):
        with pytest.raises(ArgumentError, match=difference):
            compiled(*args)


def test_it_assigns_into_its_arguments():
    def count(state, x):
        state["n"] = state["n"] + 1
        return x

    state = {"n": jnp.int32(0)}
    ts.jit(count).lower(state, X).compile()(state, X)
    assert state["n"] == 1
    layer = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    compiled = ts.jit(lambda layer, x: layer(x)).lower(layer, X).compile()
    np.testing.assert_allclose(compiled(layer, X), layer(X), rtol=1e-6, atol=1e-6)


def test_the_parameters_of_a_step_are_the_steps():
    @ts.graph.training_step
    def step(x):
        return x @ scope.parameter("w", (8,), init="ones")

    compiled = step.compile(X[None])
    with pytest.raises(OutsideTraceError, match="is called without it"):
        compiled(X[None])


def test_a_stage_says_what_jax_says():
    step = ts.jit(body, donate_argnums=0)
    lowered = step.lower({"x": X}, X)
    assert "stablehlo" in lowered.as_text()
    assert "HloModule" in lowered.as_text("hlo")
    assert lowered.compiler_ir() is not None
    assert lowered.cost_analysis()["flops"] > 0
    (tree, y), kwargs = lowered.args_info
    assert (tree["x"].donated, y.donated, kwargs) == (True, False, {})
    assert lowered.out_info["sum"].shape == (8,)
    assert lowered.donate_argnums == (0,)
    assert lowered.in_tree == jax.tree.structure((({"x": X}, X), {}))
    assert lowered.out_tree == jax.tree.structure(body({"x": X}, X))
    assert lowered.in_avals[0][1] == jax.typeof(X)
    compiled = lowered.compile()
    assert compiled.cost_analysis()["flops"] > 0
    assert compiled.memory_analysis().output_size_in_bytes >= 64
    assert compiled.runtime_executable() is not None
    assert len(step.trace({"x": X}, X).jaxpr.eqns) == 2


def test_a_program_says_its_layouts(dp_mesh):
    step = ts.jit(
        body,
        mesh=dp_mesh,
        in_specs={"tree": P("dp")},
        out_specs={"sum": P("dp"), "x": P()},
    )
    compiled = step.compile({"x": X}, y=X)
    (tree,), named = compiled.input_shardings
    assert (tree["x"].spec, named["y"].spec) == (P("dp"), P())
    assert compiled.output_shardings["sum"].spec == P("dp")
    assert compiled.out_info["x"].sharding.spec == P()


def test_the_shape_of_a_result_is_found_without_running_it():
    found = ts.jit(body).eval_shape({"x": X}, X)
    assert jax.tree.map(lambda t: (t.shape, t.dtype), found) == {
        "sum": ((8,), X.dtype),
        "x": ((8,), X.dtype),
    }


def test_a_cache_is_cleared():
    traces = []
    step = ts.jit(lambda x: traces.append(0) or x + 1.0)
    for _ in range(2):
        step(X)
        step.clear_cache()
    assert len(traces) == 2
    assert step.num_programs() == 0
    assert step.last is None


def test_a_function_of_arrays_is_exported():
    step = ts.jit(lambda tree, y: {"sum": tree["x"] + y})
    exported = jax.export.export(step)({"x": X}, X)
    np.testing.assert_allclose(exported.call({"x": X}, X)["sum"], X * 2, rtol=1e-6)
    with pytest.raises(OutsideTraceError, match="not a function of arrays alone"):
        jax.export.export(ts.jit(body))({"x": X}, X, 3)
