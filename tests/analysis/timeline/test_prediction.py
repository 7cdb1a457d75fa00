# SPDX-License-Identifier: Apache-2.0
"""The timeline of whole programs, against seconds computed by hand."""

import dataclasses

import pytest

from tessera.analysis.timeline.prediction import timeline
from tessera.analysis.timeline.timeline import Communication
from tessera.errors import MeshShapeError, NoTargetError
from tessera.mesh import Mesh
from tests.analysis.timeline.round_targets import GPU

# A gather of 8 ms x 7/8 beside a matmul of 2 x 1000 x 1000 x N FLOPs at 1e12 FLOP/s.
OVERLAP = """HloModule step, is_scheduled=true, num_partitions=8
ENTRY e {
  x = f32[250] parameter(0)
  a = bf16[1000,1000] parameter(1)
  b = bf16[1000,WIDTH] parameter(2)
  s = (f32[250], f32[2000]) all-gather-start(x), replica_groups=[1,8]<=[8]
  m = bf16[1000,WIDTH] dot(a, b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  d = f32[2000] all-gather-done(s)
  ROOT t = (f32[2000], bf16[1000,WIDTH]) tuple(d, m)
}"""
GATHER = 8e-3 * 7 / 8


def mesh_on(target):
    return Mesh(["fsdp"], shape=(8,), target=target)


@pytest.fixture
def mesh():
    return mesh_on(GPU)


@pytest.mark.parametrize(("width", "matmul"), [(1000, 6e-3), (2000, 10e-3)])
def test_a_matmul_hides_a_gather_as_long_as_it_runs(mesh, width, matmul):
    found = timeline(OVERLAP.replace("WIDTH", str(width)), mesh)
    # The matmul waits for memory: it moves 2 (1000² + 2 · 1000 N) bytes at 1e9 bytes/s.
    exposed = max(0.0, GATHER - matmul)
    assert found.compute == pytest.approx(matmul)
    assert found.computation == {"matmul": pytest.approx(matmul)}
    assert found.exposed == pytest.approx(exposed)
    assert found.overlapped == pytest.approx(GATHER - exposed)
    assert found.overlap == pytest.approx(min(1.0, matmul / GATHER))
    assert found.seconds == pytest.approx(max(matmul, GATHER))
    assert found.communication == {
        ("fsdp",): Communication(
            *map(pytest.approx, (GATHER, exposed, GATHER - exposed))
        )
    }


def test_a_loop_repeats_its_collectives(mesh):
    text = """HloModule step, is_scheduled=true, num_partitions=8
body {
  p = (s32[], f32[2000]) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  x = f32[2000] get-tuple-element(p), index=1
  r = f32[2000] all-reduce(x), replica_groups=[1,8]<=[8]
  ROOT t = (s32[], f32[2000]) tuple(i, r)
}
condition {
  p = (s32[], f32[2000]) parameter(0)
  ROOT c = pred[] constant(true)
}
ENTRY e {
  x = (s32[], f32[2000]) parameter(0)
  ROOT w = (s32[], f32[2000]) while(x), condition=condition, body=body,
    backend_config={"known_trip_count":{"n":"26"}}
}""".replace(",\n    backend", ", backend")
    found = timeline(text, mesh)
    assert found.seconds == found.exposed == pytest.approx(26 * 2 * GATHER)
    assert found.compute == found.overlapped == 0
    event = next(each for each in found.operations if each.name == "r")
    assert (event.kind, event.axes, event.stream) == ("all-reduce", ("fsdp",), "NVLink")
    assert event.times == 26
    assert event.each == pytest.approx(2 * GATHER)
    assert event.exposed == pytest.approx(found.exposed)


LOOP = """HloModule step, is_scheduled=true, num_partitions=8
body {
  p = (s32[], f32[250], bf16[1000,1000]) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  x = f32[250] get-tuple-element(p), index=1
  a = bf16[1000,1000] get-tuple-element(p), index=2
  s = (f32[250], f32[2000]) all-gather-start(x), replica_groups=[1,8]<=[8]
  BEFORE
  d = f32[2000] all-gather-done(s)
  AFTER
  ROOT t = (s32[], f32[250], bf16[1000,1000]) tuple(i, x, m)
}
condition {
  p = (s32[], f32[250], bf16[1000,1000]) parameter(0)
  ROOT c = pred[] constant(true)
}
ENTRY e {
  x = (s32[], f32[250], bf16[1000,1000]) parameter(0)
  w = (s32[], f32[250], bf16[1000,1000]) while(x), condition=condition, body=body, TRIPS
  y = f32[250] get-tuple-element(w), index=1
  ROOT r = f32[2000] all-gather(y), replica_groups=[1,8]<=[8], dimensions={0}
}"""


@pytest.mark.parametrize(("is_beside", "hidden"), [(True, 3 * 6e-3), (False, 0.0)])
def test_the_overlap_counts_each_iteration_of_a_loop(mesh, is_beside, hidden):
    matmul = (
        "m = bf16[1000,1000] dot(a, a), lhs_contracting_dims={1}, "
        "rhs_contracting_dims={0}"
    )
    text = LOOP.replace("BEFORE" if is_beside else "AFTER", matmul)
    text = text.replace("AFTER" if is_beside else "BEFORE", "")
    text = text.replace("TRIPS", 'backend_config={"known_trip_count":{"n":"3"}}')
    found = timeline(text, mesh)
    # Three gathers of 7 ms beside 6 ms of matmul, or none; one after the loop.
    assert found.overlapped == pytest.approx(hidden)
    assert found.overlap == pytest.approx(hidden / (4 * GATHER))
    gathers = {each.name: each for each in found.operations if each.axes}
    assert gathers["s"].total == pytest.approx(3 * GATHER)
    assert gathers["r"].exposed == pytest.approx(GATHER)


def test_the_start_of_a_step_is_idle_time(mesh):
    overhead = {**GPU.machine.overhead, "step": 0.5}
    machine = dataclasses.replace(GPU.machine, overhead=overhead)
    slow = mesh_on(dataclasses.replace(GPU, machine=machine))
    text = OVERLAP.replace("WIDTH", "1000")
    assert timeline(text, slow).seconds == pytest.approx(
        0.5 + timeline(text, mesh).seconds
    )
    assert timeline(text, slow).idle == pytest.approx(0.5)
    assert timeline(text, mesh).idle == pytest.approx(0.0)


def test_the_order_of_the_devices_decides_which_links_a_collective_takes():
    text = """HloModule step, is_scheduled=true, num_partitions=4
ENTRY e {
  x = f32[1000] parameter(0)
  ROOT r = f32[1000] all-reduce(x), replica_groups=[2,2]<=[4]
}"""
    near, far = [0, 1, 8, 9], [0, 8, 1, 9]
    seconds = [
        timeline(text, Mesh(["device"], devices=order, target="h100:2x8")).seconds
        for order in (near, far)
    ]
    # Two rounds of latency: 4 µs inside of a host and 12 µs outside.
    assert seconds[0] == pytest.approx(2e-3 + 2 * 4e-6 + 4000 / (0.8 * 450e9))
    assert seconds[1] == pytest.approx(2e-3 + 2 * 12e-6 + 4000 / (0.85 * 50e9))


def test_each_event_has_the_line_that_it_comes_from(mesh):
    metadata = 'metadata={op_name="jit(step)/dot" source_file="me.py" source_line=7}'
    text = OVERLAP.replace("WIDTH", "1000")
    text = text.replace(
        "rhs_contracting_dims={0}", f"rhs_contracting_dims={{0}}, {metadata}"
    )
    lines = {
        each.name: (each.source, each.op_name)
        for each in timeline(text, mesh).operations
    }
    assert lines["m"] == ("me.py:7", "jit(step)/dot")


def test_a_mesh_without_a_target_has_no_times():
    with pytest.raises(NoTargetError, match="T713"):
        timeline(OVERLAP, Mesh(["fsdp"], devices=range(8)))


def test_the_mesh_is_that_of_the_program(mesh):
    with pytest.raises(MeshShapeError, match="a program for 4"):
        timeline(OVERLAP.replace("num_partitions=8", "num_partitions=4"), mesh)


@pytest.mark.parametrize(
    ("compiler", "said"),
    [("cuda", "a roofline of each operation"), ("cpu", "compiled for the CPU")],
)
def test_the_text_says_what_the_times_are_from(compiler, said):
    target = dataclasses.replace(GPU, compiler=compiler)
    found = timeline(OVERLAP.replace("WIDTH", "1000"), mesh_on(target))
    assert said in found.rule


@pytest.mark.parametrize(
    "collective",
    [
        "all-reduce(x), channel_id=1, replica_groups=groups of tomorrow",
        "all-shuffle(x), channel_id=1, replica_groups=[1,8]<=[8]",
        "all-reduce(x), channel_id=1, replica_groups={{0,9}}",
    ],
)
def test_what_an_unknown_collective_takes_is_not_made_up(mesh, collective):
    header = "HloModule m, is_scheduled=true, num_partitions=8\nENTRY e {\n"
    text = header + (
        "  x = f32[1000] parameter(0)\n"
        "  a = f32[1000] COLLECTIVE\n"
        "  ROOT b = f32[1000] negate(a)\n"
        "}"
    )
    found = timeline(text.replace("COLLECTIVE", collective), mesh)
    alone = timeline(text.replace("COLLECTIVE", "bitcast(x)"), mesh)
    assert (found.unknown_collectives, alone.unknown_collectives) == (1, 0)
    assert found.seconds == alone.seconds
    assert found.communication == {}
    assert "unknown: 1 collectives" in found.as_text()
