# SPDX-License-Identifier: Apache-2.0
"""The Graph: what it says of its values, and what holds of every graph."""

from dataclasses import FrozenInstanceError, replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera.graph.ir import Graph, Role, Value, verify
from tessera.jax_compat import jaxprs
from tessera.shard import tensor


def aval(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def graph_of(function, *avals, mesh=None):
    """A graph of a function, with inputs a, b, … and outputs result0, …"""
    program = jax.make_jaxpr(function)(*avals)
    spec = None if mesh is None else P()
    inputs = [Value(name, a, spec) for name, a in zip("abcd", avals, strict=False)]
    outputs = [
        Value(f"result{i}", v.aval, spec) for i, v in enumerate(jaxprs.outputs(program))
    ]
    graph = Graph(
        name="f",
        program=program,
        mesh=mesh,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
    )
    return graph.with_program(program)


def test_a_value_says_its_type_layout_and_role():
    value = Value("batch/tokens", aval(8, 16, dtype=jnp.int32), P("dp"))
    assert value.describe() == "batch/tokens: int32[8,16] over P('dp',)"
    table = Value("table", aval(), None, Role.PARAMETER)
    assert table.describe() == "table: float32[] over undeclared (parameter)"


def test_a_graph_cannot_be_changed_in_place():
    graph = graph_of(jnp.sin, aval(2))
    with pytest.raises(FrozenInstanceError):
        graph.name = "g"


def test_a_graph_reads_from_its_inputs_to_its_equations(dp_mesh):
    text = graph_of(jnp.sin, aval(8), mesh=dp_mesh).as_text()
    assert text.startswith(
        "step f on dp mesh, 8\n"
        "inputs:\n"
        "  a: float32[8] over P()\n"
        "outputs:\n"
        "  result0: float32[8] over P()\n"
        "equations:\n"
    )
    assert "b:f32[8] = sin a" in text


def test_a_graph_without_a_mesh_is_for_one_device():
    graph = graph_of(jnp.sin, aval(8))
    assert graph.as_text().startswith("step f on one device\n")
    assert graph.sharding(graph.inputs[0]) is None


def test_a_declared_layout_is_a_sharding_on_the_mesh(dp_mesh):
    graph = graph_of(jnp.sin, aval(8), mesh=dp_mesh)
    value = Value("x", aval(8), P("dp"))
    assert graph.sharding(value) == NamedSharding(dp_mesh.jax, P("dp"))
    assert graph.sharding(replace(value, spec=None)) is None


def test_a_graph_on_a_mesh_of_other_machines_has_shardings_too(large_mesh):
    graph = graph_of(jnp.sin, aval(72), mesh=large_mesh)
    sharding = graph.sharding(Value("x", aval(72), P("tp")))
    assert sharding.shard_shape((72,)) == (18,)


def test_a_graph_knows_what_it_is_compiled_for(dp_mesh, large_mesh):
    assert graph_of(jnp.sin, aval(8)).platform == "cpu"
    assert graph_of(jnp.sin, aval(8), mesh=dp_mesh).platform == "cpu"
    assert graph_of(jnp.sin, aval(8), mesh=large_mesh).platform == "cpu"


# --- captured arrays


def test_an_array_in_new_equations_becomes_an_input(dp_mesh):
    held = jax.device_put(jnp.arange(8.0), NamedSharding(dp_mesh.jax, P("dp")))
    graph = graph_of(lambda a: a * held, aval(8), mesh=dp_mesh)
    assert [value.describe() for value in graph.inputs] == [
        "a: float32[8] over P()",
        "captured_0: float32[8] over P('dp',) (captured)",
    ]
    assert graph.captured[0] is held
    verify(graph)


def test_arrays_of_later_equations_are_numbered_on():
    first, second = jnp.arange(3.0), jnp.arange(3.0) + 1
    graph = graph_of(lambda a: a * first, aval(3))
    program = jax.make_jaxpr(lambda a, b: a * b * second)(aval(3), aval(3))
    graph = graph.with_program(program)
    assert [v.name for v in graph.inputs] == ["a", "captured_0", "captured_1"]
    assert graph.captured[0] is first
    assert graph.captured[1] is second


# --- what verify checks


def test_a_well_formed_graph_verifies(dp_mesh):
    verify(graph_of(lambda a, b: (a @ b, a), aval(2, 3), aval(3, 4), mesh=dp_mesh))


def test_constants_in_a_program_are_a_bug():
    held = jnp.arange(3.0)
    graph = graph_of(jnp.sin, aval(3))
    broken = replace(graph, program=jax.make_jaxpr(lambda a: a * held)(aval(3)))
    with pytest.raises(AssertionError, match="captured arrays must be inputs"):
        verify(broken)


def test_an_input_that_nobody_describes_is_a_bug():
    graph = graph_of(lambda a, b: a + b, aval(3), aval(3))
    with pytest.raises(AssertionError, match="1 inputs described, 2 in the program"):
        verify(replace(graph, inputs=graph.inputs[:1]))


def test_an_output_that_is_described_wrongly_is_a_bug():
    graph = graph_of(jnp.sin, aval(3))
    wrong = replace(graph.outputs[0], aval=aval(4))
    with pytest.raises(AssertionError, match="output 'result0' is described as"):
        verify(graph.with_outputs([wrong]))


def test_a_program_that_does_not_type_check_is_a_bug():
    graph = graph_of(lambda a, b: a + b, aval(3), aval(3))
    other = graph_of(lambda a, b: a + b, aval(4), aval(4))
    equation = jaxprs.equations(graph.program)[0]
    mixed = equation.replace(invars=jaxprs.equations(other.program)[0].invars)
    body = getattr(graph.program, "jaxpr", graph.program).replace(eqns=[mixed])
    with jax.enable_checks(True), pytest.raises(Exception, match="Variable"):
        verify(replace(graph, program=jax.extend.core.ClosedJaxpr(body, ())))


def test_a_lazy_tensor_stays_lazy_in_a_graph(dp_mesh):
    table = tensor((8, 2), name="table", mesh=dp_mesh)
    traced = ts.function(lambda x: table[0] * x).trace(aval(2))
    assert traced.graph.inputs[1].role is Role.PARAMETER
    assert "lazy" in repr(table)
