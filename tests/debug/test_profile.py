# SPDX-License-Identifier: Apache-2.0
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera import dist
from tessera.errors import OutsideTraceError


def step(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)


def compiled_on(mesh, **options):
    return ts.function(
        step, mesh=mesh, in_specs={"w": P(), "x": P("dp")}, out_specs=P(), **options
    )


W, X = jnp.ones((8, 4)), jnp.ones((16, 8))


@pytest.mark.full
def test_a_step_is_run_and_its_communication_measured(dp_mesh):
    report = dist.profile(compiled_on(dp_mesh), W, X)
    found = report.measured
    assert found is not None
    assert report.reason == ""
    assert list(found.communication) == [("dp",)]
    time = found.communication["dp",]
    # One all-reduce on each device in each execution.
    assert time.calls == 1
    assert 0 < time.seconds < found.seconds
    assert 0 < found.compute < found.seconds
    assert found.overlap == 0  # XLA on CPU waits for each of its collectives
    text = report.as_text()
    assert "measured on cpu, per device and execution: mean of 3 executions" in text
    assert "communication over dp" in text
    assert "devices simulated on a CPU share its cores" in text
    assert found.executions == 3
    assert report.collectives.rows[0].is_planned


@pytest.mark.slow(reason="a trace holds every program of the process")
def test_arguments_outlive_the_runs_that_would_overwrite_or_free_them(dp_mesh):
    w = jax.device_put(W, jax.NamedSharding(dp_mesh.jax, P()))
    report = dist.profile(compiled_on(dp_mesh, donate=["w"]), w, X)
    assert report.measured is not None
    assert not w.is_deleted()


def test_shapes_are_enough_for_an_estimate(dp_mesh):
    shapes = (
        jax.ShapeDtypeStruct(W.shape, W.dtype),
        jax.ShapeDtypeStruct(X.shape, X.dtype),
    )
    report = dist.profile(compiled_on(dp_mesh), *shapes)
    assert report.measured is None
    assert report.reason == "the arguments are shapes, not arrays"
    text = report.as_text()
    assert "estimate for cpu" in text
    assert "not measured: the arguments are shapes, not arrays" in text


def test_a_mesh_of_other_machines_is_estimated():
    mesh = ts.Mesh(["dp"], devices=range(72))
    report = dist.profile(compiled_on(mesh), W, jnp.ones((72, 8)))
    assert report.reason == "this machine does not have the mesh's devices"
    assert report.collectives.rows


@pytest.mark.slow(reason="a trace holds every program of the process")
def test_the_step_that_ran_last_is_reported_without_running_it_again(dp_mesh):
    function = compiled_on(dp_mesh)
    function(W, X)
    report = dist.profile()
    assert report.compiled is function.last
    assert report.measured is None
    assert "not measured: it takes the step's arguments" in report.as_text()
    assert dist.profile(function).compiled is function.last


@pytest.mark.slow(reason="a trace holds every program of the process")
def test_while_another_trace_runs_there_is_an_estimate(dp_mesh, tmp_path):
    with jax.profiler.trace(str(tmp_path)):
        report = dist.profile(compiled_on(dp_mesh), W, X)
    assert report.reason == "another trace of the profiler is running"


def test_a_step_that_never_ran_cannot_be_profiled():
    with pytest.raises(OutsideTraceError) as caught:
        dist.profile(ts.function(step))
    assert str(caught.value) == (
        "[T302] there is no step to profile: none was run yet\n"
        "  fix: run one first, or pass its arguments too: dist.profile(step, batch)\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T302.html"
    )
