# SPDX-License-Identifier: Apache-2.0
"""One call of a function becomes a graph: inputs, parameters, captured arrays, mesh."""

import contextvars
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera.errors import (
    MeshConflictError,
    OutsideTraceError,
    ParameterNameError,
    UnconnectedGradientError,
)
from tessera.graph.gradient_primitive import backward
from tessera.graph.ir import Role
from tessera.graph.tracer.arguments import flatten_args
from tessera.graph.tracer.declared_layouts import Options
from tessera.graph.tracer.tracer import trace
from tessera.jax_compat import jaxprs
from tessera.mesh import Mesh
from tessera.shard import ShardSpec, tensor
from tessera.tracing import casts, scope

X = jnp.linspace(-1.0, 1.0, 8, dtype=jnp.float32)


def traced(function, *args, **options):
    names = function.__code__.co_varnames[: len(args)]
    call = flatten_args(names, args, {})
    return trace(function, call, Options(name="f", **options))


def described(trace):
    return [value.describe() for value in trace.graph.inputs]


def on(mesh, *spec):
    return jax.device_put(X, NamedSharding(mesh.jax, P(*spec)))


# --- inputs


def test_inputs_are_arguments_then_parameters_then_captured_arrays(dp_mesh):
    table = tensor((8,), ShardSpec((0,), ("dp",)), dp_mesh, name="table")
    held = jnp.ones(8)

    def function(x, tree):
        scale = scope.parameter("scale", (8,), init="ones")
        return x * table * scale * held + tree["y"]

    found = traced(function, X, {"y": X, "static": 3})
    assert described(found) == [
        "x: float32[8] over P()",
        "tree/y: float32[8] over P()",
        "scale: float32[8] over P() (parameter)",
        "table: float32[8] over P('dp',) (parameter)",
        "captured_0: float32[8] over P() (captured)",
    ]
    assert found.parameters["table"] is table
    assert found.graph.captured[0] is held
    assert "lazy" in repr(table)


def test_a_tensor_that_is_passed_is_an_argument_not_a_parameter(dp_mesh):
    table = tensor((8,), ShardSpec((0,), ("dp",)), dp_mesh, name="table")
    found = traced(lambda x: x * 2.0, table)
    assert described(found) == ["x: float32[8] over P('dp',)"]
    assert found.parameters == {}


def test_arrays_without_a_layout_are_replicated_on_a_mesh_and_undeclared_off_it(
    dp_mesh,
):
    assert described(traced(lambda x: x, X)) == ["x: float32[8] over undeclared"]
    found = traced(lambda x: x, X, mesh=dp_mesh)
    assert described(found) == ["x: float32[8] over P()"]


def test_weak_types_are_kept():
    found = traced(lambda x: x * 2, jnp.asarray(1.0))
    assert jaxprs.inputs(found.graph.program)[0].aval.weak_type


TABLE = tensor((8,), init="ones", name="table")


@jax.jit
def times_table(x):
    return x * TABLE


@pytest.mark.parametrize("used_before", ["never", "eagerly", "in another trace"])
def test_a_tensor_that_a_jitted_function_uses_is_a_parameter(used_before):
    times_table.clear_cache()
    if used_before == "eagerly":
        times_table(X)
    elif used_before == "in another trace":
        traced(lambda x: times_table(x), X)
    found = traced(lambda x: times_table(x) + 1.0, X)
    assert described(found)[1] == "table: float32[8] over undeclared (parameter)"
    np.testing.assert_array_equal(ts.function(lambda x: times_table(x))(X), X)
    np.testing.assert_array_equal(times_table(X), X)


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint])
def test_parameters_may_be_declared_in_a_nested_function(wrap):
    @wrap
    def layer(x):
        return x * scope.parameter("w", (8,), init="ones")

    step = ts.function(lambda x: ts.grad(jnp.sum(layer(x)), x))
    np.testing.assert_array_equal(step(X), jnp.ones(8))


def test_parameters_that_differ_from_trace_to_trace_are_refused():
    count = contextvars.ContextVar("count", default=0)

    def function(x):
        count.set(count.get() + 1)
        return x * scope.parameter(f"w{count.get()}", (8,), init="ones")

    with pytest.raises(ParameterNameError) as caught:
        traced(function, X)
    assert str(caught.value) == (
        "[T305] the parameters of 'f' are others every time that it is traced\n"
        "  got: 'w9', before 'w8'\n"
        "  fix: name them after what they are: a step is traced more than once\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T305.html"
    )


def test_a_tensor_in_a_derivative_rule_is_refused():
    table = tensor((8,), init="ones", name="table")
    rule = jax.custom_vjp(lambda x: x * 2.0)
    rule.defvjp(lambda x: (x * 2.0, None), lambda _, g: (g * table,))
    step = ts.function(lambda x: ts.grad(jnp.sum(rule(x)), x))
    with pytest.raises(OutsideTraceError) as caught:
        step(X)
    assert str(caught.value) == (
        "[T302] tensor 'table' is used in a derivative rule that closes over it\n"
        "  got: DistTensor('table', float32[8], P(), lazy)\n"
        "  fix: pass it to the function that has the rule, as an argument\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T302.html"
    )


# --- the result


def test_the_result_is_put_together_around_what_is_no_array():
    def function(x):
        return {"x": x, "name": "f", "none": None, "count": 3, "kind": jnp.float32}

    found = traced(function, X)
    assert [value.name for value in found.graph.outputs] == ["result/count", "result/x"]
    assert found.unflatten([10, 11]) == {
        "x": 11,
        "name": "f",
        "none": None,
        "count": 10,
        "kind": jnp.float32,
    }


def test_numbers_and_numpy_arrays_in_the_result_become_arrays():
    found = traced(lambda x: (1, 2.5, True, np.arange(3), np.float32(1)), X)
    dtypes = [value.aval.dtype.name for value in found.graph.outputs]
    assert dtypes == ["int32", "float32", "bool", "int32", "float32"]


def test_strings_of_numpy_are_no_arrays():
    assert traced(lambda x: np.str_("a"), X).result.statics == {0: np.str_("a")}


# --- the mesh


def test_the_mesh_is_the_one_that_is_declared_or_open(dp_mesh, grid_mesh):
    assert traced(lambda x: x, X).graph.mesh is None
    assert traced(lambda x: x, X, mesh=dp_mesh).graph.mesh == dp_mesh
    with grid_mesh:
        assert traced(lambda x: x, X).graph.mesh == grid_mesh
        assert traced(lambda x: x, X, mesh=dp_mesh).graph.mesh == dp_mesh


def test_the_mesh_is_that_of_an_argument(dp_mesh):
    assert traced(lambda x: x, on(dp_mesh, "dp")).graph.mesh == dp_mesh


def test_the_mesh_is_that_of_a_captured_tensor(dp_mesh):
    table = tensor((8,), ShardSpec((0,), ("dp",)), dp_mesh)
    assert traced(lambda x: x * table, X).graph.mesh == dp_mesh


def test_the_mesh_is_that_of_a_captured_array(dp_mesh):
    held = on(dp_mesh, "dp")
    found = traced(lambda x: x * held, X)
    assert found.graph.mesh == dp_mesh
    assert described(found)[1] == "captured_0: float32[8] over P('dp',) (captured)"


def test_the_mesh_is_that_of_a_manual_region_inside(dp_mesh):
    def function(x):
        return jax.shard_map(
            jnp.sin, mesh=dp_mesh.jax, in_specs=P("dp"), out_specs=P("dp")
        )(x)

    assert traced(function, X).graph.mesh == dp_mesh


def test_parameters_take_the_mesh_that_is_met_later(dp_mesh):
    def function(x):
        weight = scope.parameter(
            "w",
            (8,),
            init="ones",
            layout=ShardSpec((0,), ("dp",)) if scope.current().mesh else None,
        )
        return x * weight * held

    held = on(dp_mesh, "dp")
    assert (
        described(traced(function, X))[1] == "w: float32[8] over P('dp',) (parameter)"
    )


@pytest.mark.parametrize("kind", ["argument", "tensor", "array"])
def test_two_meshes_in_one_step_are_refused(kind, dp_mesh):
    grid_mesh = Mesh(["dp", "tp"], devices=range(7, -1, -1), shape=(2, 4))
    other = on(grid_mesh, "tp")
    if kind == "tensor":
        other = tensor((8,), ShardSpec((0,), ("tp",)), grid_mesh)
    x = on(dp_mesh, "dp")

    def function(x, y=other):
        return x + y

    arguments = (x, other) if kind == "argument" else (x,)
    with pytest.raises(MeshConflictError, match=r"\[T308\] the inputs of one step"):
        traced(function, *arguments)


# --- what the body may do


def test_the_scope_of_a_step_is_open_while_it_is_traced_and_only_then():
    seen = []
    traced(lambda x: seen.append(scope.current()) or x, X)
    assert seen[0] is not None
    assert scope.current() is None


def test_a_body_that_raises_leaves_nothing_open(dp_mesh):
    table = tensor((8,), init="ones", name="table")

    def function(x):
        with ts.autocast("bf16"), scope.named("encoder"):
            _ = x * table
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        traced(function, X, mesh=dp_mesh)
    assert scope.current() is None
    assert casts.current_autocast() is None
    assert jnp.asarray(table).all()


def test_an_error_in_the_body_shows_the_users_line():
    def inner(x):
        return x @ jnp.ones((3, 3))  # the line

    @ts.function
    def function(x):
        return inner(x)

    with pytest.raises(TypeError) as caught:
        function(X)
    lines = [frame.line for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert "return x @ jnp.ones((3, 3))  # the line" in lines


def test_errors_of_jax_name_the_users_function_and_argument():
    @ts.function
    def choose(batch):
        return batch["x"] * np.asarray(batch["flag"])

    with pytest.raises(jax.errors.TracerArrayConversionError) as caught:
        choose({"x": X, "flag": jnp.array(True)})
    line = choose.body.__code__.co_firstlineno
    assert f"tracing the function choose at {__file__}:{line}" in str(caught.value)
    assert "the value of the argument batch_flag" in str(caught.value)


def test_equations_carry_the_users_lines():
    found = traced(lambda x: jnp.sin(x) + tensor((8,)), X)
    lines = {jaxprs.source_line(e) for e in jaxprs.equations(found.graph.program)}
    assert {line.split(":")[0] for line in lines} == {__file__}


def test_an_autocast_around_a_trace_reaches_inside():
    with ts.autocast("bf16"):
        found = traced(lambda x: jnp.sin(x), X)
    (equation,) = jaxprs.equations(found.graph.program)
    assert jaxprs.name_scopes(equation) == "autocast_bfloat16"


def test_flax_modules_trace_as_they_are():
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(8, 2, rngs=nnx.Rngs(0))
    found = traced(lambda model, x: model(x), model, X)
    assert sorted(v.name for v in found.graph.inputs)[-1] == "x"
    assert len(found.graph.inputs) == 3


# --- parameters that a loss does not reach


def test_backward_leaves_out_what_the_loss_ignores():
    def function(x):
        used = scope.parameter("used", (8,), init="ones")
        scope.parameter("ignored", (8,), init="ones")
        return backward(jnp.sum(x * used))

    assert [v.name for v in traced(function, X).graph.outputs] == ["result/used"]


def test_each_backward_has_parameters_of_its_own():
    def function(x):
        a = scope.parameter("a", (8,), init="ones")
        b = scope.parameter("b", (8,), init="ones")
        return backward(jnp.sum(x * a)), backward(jnp.sum(x * b))

    names = [value.name for value in traced(function, X).graph.outputs]
    assert names == ["result/0/a", "result/1/b"]


def test_a_loss_that_reaches_no_parameter_is_refused():
    def function(x):
        scope.parameter("a", (8,), init="ones")
        return backward(jnp.sum(x))

    line = function.__code__.co_firstlineno + 2
    with pytest.raises(UnconnectedGradientError) as caught:
        traced(function, X)
    assert str(caught.value) == (
        "[T303] the loss depends on no trainable parameter of the step\n"
        "  got: none of 1: 'a'\n"
        f"  got: graph.backward was called at {__file__}:{line}\n"
        "  fix: compute the loss from them, at the level where graph.backward is "
        "called\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T303.html"
    )


def test_parameters_in_a_graph_have_their_role(dp_mesh):
    found = traced(lambda x: x * scope.parameter("w", (8,), init="ones"), X)
    assert [value.role for value in found.graph.inputs] == [
        Role.ARGUMENT,
        Role.PARAMETER,
    ]
