# SPDX-License-Identifier: Apache-2.0
"""Events of traces: those that this JAX writes, and the forms of other backends."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from tessera.analysis import hlo, trace_events
from tessera.analysis.trace_events import OpEvent, op_events


def test_a_trace_of_this_jax_has_each_operation_on_each_device(dp_mesh, tmp_path):
    sharding = jax.NamedSharding(dp_mesh.jax, jax.P("dp"))
    x = jax.device_put(jnp.ones((16, 32)), sharding)

    def step(x):
        return jnp.sum(jnp.tanh(x @ x.T))

    compiled = jax.jit(step).lower(x).compile()
    module = hlo.parse(compiled.as_text() or "")
    compiled(x).block_until_ready()
    with jax.profiler.trace(str(tmp_path)):
        compiled(x).block_until_ready()
        (x + 1).block_until_ready()  # another program
    found = op_events(tmp_path, module.name)
    names = {
        i.name for c in module.computations.values() for i in c.instructions.values()
    }
    assert {event.op for event in found} <= names
    assert {event.device for event in found} == set(range(8))
    assert all(event.start <= event.end for event in found)
    (reduced,) = [
        i.name
        for i in module.computations[module.entry].instructions.values()
        if i.opcode == "all-reduce"
    ]
    assert sum(event.op == reduced for event in found) == 8
    assert op_events(tmp_path, "jit_nothing") == []


def test_a_folder_without_a_trace_has_no_events(tmp_path):
    assert op_events(tmp_path, "jit_step") == []


def event(name, start, length, **stats):
    return SimpleNamespace(
        name=name, start_ns=start, duration_ns=length, stats=stats.items()
    )


def plane(name, **lines):
    return SimpleNamespace(
        name=name,
        lines=[
            SimpleNamespace(name=line.replace("_", " "), events=events)
            for line, events in lines.items()
        ],
    )


@pytest.fixture
def read(monkeypatch, tmp_path):
    """Reads planes as if a backend had written them."""

    def read(*planes):
        folder = tmp_path / "plugins/profile/today"
        folder.mkdir(parents=True)
        (folder / "host.xplane.pb").touch()
        data = SimpleNamespace(planes=planes)
        kind = SimpleNamespace(from_file=lambda path: data)
        monkeypatch.setattr(trace_events, "ProfileData", kind)
        return op_events(tmp_path, "jit_step")

    return read


def test_kernels_of_a_gpu_stand_in_the_plane_of_their_device(read):
    kernels = [
        event("ampere_sgemm", 1000, 2000, hlo_op="dot.1", hlo_module="jit_step"),
        event("ampere_sgemm", 1000, 2000, hlo_op="dot.1", hlo_module="jit_other"),
        event("memcpy", 1000, 2000),
    ]
    found = read(plane("/device:GPU:3", Stream_7=kernels), plane("/host:CPU"))
    assert found == [OpEvent("dot.1", 3, pytest.approx(1e-6), pytest.approx(3e-6))]


def test_a_plane_with_a_line_of_operations_is_read_by_that_line(read):
    ops = [event("%fusion.3 = f32[8]{0} fusion(%x)", 0, 1000)]
    steps = [event("step 1", 0, 5000, hlo_op="fusion.3")]
    found = read(plane("/device:TPU:0", XLA_Ops=ops, Steps=steps))
    assert [each.op for each in found] == ["fusion.3"]
