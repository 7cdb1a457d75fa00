# SPDX-License-Identifier: Apache-2.0
"""The stages of a step as objects: what each holds, and that it prints."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera.errors import AbstractMeshError, NoTargetError, UnknownPassError
from tessera.graph import compile_stages
from tessera.jax_compat.equation_lines import PACKAGE
from tessera.mesh import Mesh

# What was compiled elsewhere has the lines of elsewhere.
pytestmark = pytest.mark.usefixtures("compiled_here")

F32 = jnp.float32


def loss_and_slope(w, x):
    loss = jnp.sum(jnp.tanh(x @ w))
    return loss, ts.grad(loss, w)


W, X = jnp.ones((4, 2)), jnp.ones((8, 4))


def test_each_stage_gives_the_next():
    step = ts.function(loss_and_slope)
    traced = step.trace(W, X)
    lowered = traced.lower()
    compiled = lowered.compile()
    assert lowered.traced is traced
    assert compiled.traced is traced


def test_each_stage_prints_itself():
    step = ts.function(loss_and_slope)
    assert step.trace(W, X).as_text().startswith("step loss_and_slope on one device")
    assert "gradient[" in step.trace(W, X).as_text()
    assert "stablehlo.dot_general" in step.lower(W, X).as_text()
    assert "HloModule jit_loss_and_slope" in step.compile(W, X).as_text()


def test_the_text_of_a_trace_has_layouts_and_the_users_lines(dp_mesh):
    step = ts.function(loss_and_slope, mesh=dp_mesh, in_specs={"x": P("dp")})
    text = step.trace(W, X).as_text()
    assert "x: float32[8,4] over P('dp',)" in text
    assert f"{__file__}:" in text
    assert str(PACKAGE) not in text


def test_a_trace_holds_the_graph_before_and_after_the_passes():
    traced = ts.function(loss_and_slope).trace(W, X)
    assert "gradient" in traced.origin.graph.as_text()
    assert "gradient" not in traced.graph.as_text()
    assert traced.graph is traced.passes[-1].graph


def test_a_trace_shows_what_one_pass_did():
    traced = ts.function(loss_and_slope).trace(W, X)
    assert "+    " in traced.diff("differentiate_losses")
    assert traced.diff("assign_output_layouts") == ""
    with pytest.raises(UnknownPassError, match="T307"):
        traced.diff("no_such_pass")


def test_shapes_without_numbers_are_enough_for_every_stage():
    shapes = jax.ShapeDtypeStruct((4, 2), F32), jax.ShapeDtypeStruct((8, 4), F32)
    compiled = ts.function(loss_and_slope).compile(*shapes)
    assert "HloModule" in compiled.as_text()


def test_a_compiled_step_runs_on_its_arguments():
    compiled = ts.function(loss_and_slope).compile(W, X)
    loss, slope = compiled(W, X)
    expected = jax.value_and_grad(lambda w: jnp.sum(jnp.tanh(X @ w)))(W)
    np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
    np.testing.assert_allclose(slope, expected[1], rtol=1e-6)


def test_a_compiled_step_knows_its_collectives_and_their_lines(dp_mesh):
    step = ts.function(loss_and_slope, mesh=dp_mesh, in_specs={"x": P("dp")})
    ledger = step.compile(W, X).collectives
    assert {(row.kind, row.axes) for row in ledger.rows} == {("all-reduce", ("dp",))}
    assert sum(row.total_bytes for row in ledger.rows) == 4 * (1 + W.size)
    assert all(row.source.startswith(__file__) for row in ledger.rows)


def test_a_step_on_one_device_has_no_collectives():
    assert ts.function(loss_and_slope).compile(W, X).collectives.rows == ()


def test_a_compiled_step_knows_its_memory(dp_mesh):
    step = ts.function(loss_and_slope, mesh=dp_mesh, in_specs={"x": P("dp")})
    assert step.compile(W, X).memory.arguments == W.nbytes + X.nbytes // 8


def test_captured_arrays_are_moved_to_the_mesh_once(dp_mesh):
    table = jnp.arange(4.0)
    step = ts.function(lambda x: x * table, mesh=dp_mesh)
    step(jnp.ones(4))
    (placed,) = step.last.captured
    assert placed.sharding == NamedSharding(dp_mesh.jax, P())
    assert step.last.captured[0] is placed


def test_captured_arrays_are_themselves_on_one_device():
    table = jnp.arange(4.0)
    compiled = ts.function(lambda x: x * table).compile(jnp.ones(4))
    assert compiled.captured[0] is table


# --- a mesh of devices that this machine lacks


def test_every_stage_works_on_a_mesh_of_other_machines(large_mesh):
    step = ts.function(
        loss_and_slope, mesh=large_mesh, in_specs={"w": P(None, "dp"), "x": P("tp")}
    )
    shapes = jax.ShapeDtypeStruct((4, 9), F32), jax.ShapeDtypeStruct((12, 4), F32)
    compiled = step.compile(*shapes)
    assert "x: float32[12,4] over P('tp',)" in step.trace(*shapes).as_text()
    assert "num_partitions=72" in compiled.as_text()
    assert {axis for row in compiled.collectives.rows for axis in row.axes} >= {"tp"}
    assert compiled.memory.arguments == 4 * 1 * 4 + 3 * 4 * 4


def test_a_step_does_not_run_on_a_mesh_of_other_machines(large_mesh):
    step = ts.function(loss_and_slope, mesh=large_mesh)
    compiled = step.compile(W, X)
    with pytest.raises(AbstractMeshError, match="T105"):
        compiled(W, X)


def test_a_call_on_a_mesh_of_other_machines_is_refused_before_it_compiles(large_mesh):
    step = ts.function(loss_and_slope, mesh=large_mesh)
    with pytest.raises(AbstractMeshError, match="simulate them"):
        step(W, X)
    assert step.num_programs() == 0


def test_a_step_compiled_for_a_target_has_a_predicted_timeline():
    mesh = Mesh(["dp"], shape=(4,), target="cpu:4")
    step = ts.function(loss_and_slope, mesh=mesh, in_specs={"x": P("dp")})
    compiled = step.compile(W, X)
    found = compiled.timeline
    # The gradient is summed over dp once, and the loss with it or before.
    spent = found.communication["dp",].seconds
    assert 0 < found.exposed <= spent
    assert found.seconds == pytest.approx(found.compute + found.exposed + found.idle)
    rows = sum(row.counted_calls for row in compiled.collectives.rows)
    assert sum(each.times for each in found.operations if each.axes) == rows


@pytest.mark.parametrize("mesh", [None, Mesh(["dp"], devices=range(8))])
def test_an_error_of_the_compiler_for_devices_that_are_here_is_raised(
    mesh, monkeypatch
):
    def compile_lowered(graph, lowered, options):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(compile_stages, "compile_lowered", compile_lowered)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"^RESOURCE_EXHAUSTED"):
        ts.function(loss_and_slope, mesh=mesh).compile(W, X)


def test_a_step_for_devices_that_are_here_has_no_predicted_timeline(dp_mesh):
    step = ts.function(loss_and_slope, mesh=dp_mesh, in_specs={"x": P("dp")})
    with pytest.raises(NoTargetError, match="T713"):
        step.compile(W, X).timeline  # noqa: B018 - raises
