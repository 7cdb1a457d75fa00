# SPDX-License-Identifier: Apache-2.0
"""The program of one slice, as libtpu 0.0.42 writes it, is read as that of all."""

import math
import types

import numpy as np
import pytest

from tessera.analysis.ledger import collectives
from tessera.analysis.slice_programs import program_of
from tessera.analysis.timeline.prediction import timeline
from tessera.errors import MeshShapeError
from tessera.mesh import Mesh

TOKEN = "  after = token[] after-all()"
ALL = '"{1,2}x{0:3}"'


def mesh_of(target="v5e:2x2*2", **shape):
    """A mesh in the order of its devices, slice by slice."""
    names, sizes = zip(*shape.items(), strict=True)
    count = math.prod(sizes)
    return Mesh(names, devices=range(count), shape=sizes, target=target)


def across(kind, result="f32[100]", groups=ALL, key="all-reduce.5_0"):
    """What sends to other slices, and what receives."""
    attributes = (
        "is_host_transfer=true, frontend_attributes={"
        '_xla_host_transfer_handler_name="xla_megascale_runtime",'
        f'_xla_host_transfer_rendezvous="{key}",_xla_megascale_target={groups},'
        f'_xla_megascale_transfer_type="{kind}"}}'
    )
    handler = (
        'frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime"}'
    )
    return [
        "  x = f32[100] parameter(0)",
        TOKEN,
        f"  s = (f32[100], u32[], token[]) send(x, after), channel_id=2, {attributes}",
        f"  r = ({result}, u32[], token[]) recv(after), channel_id=1, {attributes}",
        f"  sd = token[] send-done(s), channel_id=2, {handler}",
        "  y = f32[100] exponential(x)",
        f"  rd = ({result}, token[]) recv-done(r), channel_id=1, {handler}",
        f"  ROOT g = {result} get-tuple-element(rd), index=0",
    ]


def text_of(lines):
    header = "HloModule step, is_scheduled=true, num_partitions=4"
    return "\n".join([header, "ENTRY e {", *lines, "}"])


def essence(lines, mesh):
    ledger = collectives(text_of(lines), mesh)
    return [(row.kind, row.axes, row.group_size, row.nbytes) for row in ledger.rows]


@pytest.mark.parametrize(
    ("kind", "result", "row"),
    [
        ("ALL_REDUCE", "f32[100]", ("all-reduce", ("dp",), 2, 400)),
        ("ALL_GATHER", "f32[200]", ("all-gather", ("dp",), 2, 800)),
        ("REDUCE_SCATTER", "f32[50]", ("reduce-scatter", ("dp",), 2, 400)),
        ("ALL_TO_ALL", "f32[100]", ("all-to-all", ("dp",), 2, 400)),
    ],
)
def test_what_is_sent_between_slices_is_a_collective(kind, result, row):
    assert essence(across(kind, result), mesh_of(dp=2, fsdp=4)) == [row]


def test_a_permutation_between_slices_has_its_pairs():
    pairs = "{{100000->200000},{200000->100000},{100001->200001},{200001->100001}}"
    lines = across("ONE_TO_ONE", groups=pairs, key="ppermute.3_0")
    mesh = mesh_of(pp=2, fsdp=4)
    (row,) = collectives(text_of(lines), mesh).rows
    assert (row.kind, row.axes, row.reason) == (
        "collective-permute",
        ("pp",),
        "written",
    )


def test_of_two_axes_that_cross_slices_one_may_be_summed_over():
    mesh = mesh_of(pp=2, dp=2, fsdp=4, target="v5e:2x2*4")
    one = "{{100000,200000},{300000,400000}}"
    assert essence(across("ALL_REDUCE", groups=one), mesh)[0][1] == ("dp",)
    other = "{{100003,300003},{200003,400003}}"
    assert essence(across("ALL_REDUCE", groups=other), mesh)[0][1] == ("pp",)
    every = '"{1:4}x{0,1,2:3}"'
    assert essence(across("ALL_REDUCE", groups=every), mesh)[0][1:3] == (
        ("pp", "dp"),
        4,
    )


def test_groups_inside_of_a_slice_count_positions_in_it():
    lines = [
        "  x = f32[100] parameter(0)",
        "  a = f32[100] all-reduce(x), replica_groups={{0,1},{2,3}}",
        "  b = f32[100] all-reduce(a), replica_groups=[2,2]<=[2,2]T(1,0)",
        "  ROOT c = f32[100] collective-permute(b), source_target_pairs={{0,2},{2,0}}",
    ]
    # dp crosses slices, and is the inner axis: its devices are not side by side.
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    inner = Mesh(["a", "b", "dp"], devices=order, shape=(2, 2, 2), target="v5e:2x2*2")
    for mesh in (mesh_of(dp=2, a=2, b=2), inner):
        found = [axes for _, axes, _, _ in essence(lines, mesh)]
        assert found == [("b",), ("a",), ("a",)]


def test_a_device_that_the_mesh_does_not_have_is_unknown():
    lines = across("ALL_REDUCE", groups="{{100000,900000}}")
    (row,) = collectives(text_of(lines), mesh_of(dp=2, fsdp=4)).rows
    assert row.is_unknown


def test_groups_in_a_newer_syntax_are_unknown():
    lines = [
        "  x = f32[100] parameter(0)",
        "  ROOT a = f32[100] all-reduce(x), replica_groups=<0,1>",
    ]
    (row,) = collectives(text_of(lines), mesh_of(dp=2, fsdp=4)).rows
    assert row.is_unknown


def test_slices_of_which_one_device_each_is_used_are_several():
    text = text_of(across("ALL_REDUCE", groups='"{1,2}x{0}"'))
    text = text.replace("num_partitions=4", "num_partitions=1")
    mesh = Mesh(["dp"], devices=[0, 4], target="v5e:2x2*2")
    assert [row.axes for row in collectives(text, mesh).rows] == [("dp",)]


def test_devices_that_are_here_are_found_by_their_own_numbers(monkeypatch):
    numbers = [100_000, 100_001, 200_001, 200_000]
    devices = np.array([types.SimpleNamespace(id=number) for number in numbers])
    mesh = Mesh(["dp", "fsdp"], devices=range(4), shape=(2, 2))
    monkeypatch.setitem(vars(mesh), "jax", types.SimpleNamespace(devices=devices))
    monkeypatch.setitem(vars(mesh), "slices", (0, 0, 1, 1))
    text = text_of(across("ALL_REDUCE", groups="{{100001,200001},{100000,200000}}"))
    module = program_of(text.replace("num_partitions=4", "num_partitions=2"), mesh)
    start = module.computations["e"].instructions["s"]
    assert start.attributes["replica_groups"] == "{{1,2},{0,3}}"


def test_what_is_received_elsewhere_is_left_as_it_is():
    lines = [
        line.replace("recv-done(r)", "recv-done(x)") for line in across("ALL_REDUCE")
    ]
    (row,) = collectives(text_of(lines), mesh_of(dp=2, fsdp=4)).rows
    assert (row.kind, row.axes) == ("all-reduce", ("dp",))


def test_the_number_of_a_slice_is_one_of_the_device():
    line = '  ROOT i = u32[] custom-call(), custom_call_target="SliceId"'
    module = program_of(text_of([line]), mesh_of(dp=2, fsdp=4))
    assert module.computations["e"].root.opcode == "partition-id"
    assert module.num_devices == 8


def test_transfers_to_the_host_are_left_as_they_are():
    lines = [
        line.replace("xla_megascale_runtime", "x") for line in across("ALL_REDUCE")
    ]
    assert essence(lines, mesh_of(dp=2, fsdp=4)) == []


def test_a_program_of_half_a_slice_is_refused():
    with pytest.raises(MeshShapeError, match="16 devices, a program for 4"):
        program_of(text_of([TOKEN]), mesh_of(dp=2, fsdp=8, target="v5e:2x4*2"))


def test_the_ledger_has_the_bytes_of_each_level_of_links():
    inside = "  z = f32[100] all-reduce(x), replica_groups={{0,1,2,3}}"
    lines = across("ALL_REDUCE")
    found = collectives(
        text_of([*lines[:6], inside, *lines[6:]]), mesh_of(dp=2, fsdp=4)
    )
    # Of 400 bytes 2 · 3/4 in a slice of four, and 2 · 1/2 between two slices.
    assert found.by_link() == {"ICI": 600.0, "DCN": 400.0}
    assert "a device sends 600 B over ICI and 400 B over DCN" in found.summary()
    cells = [line.split("  ") for line in found.as_text().splitlines()[1:3]]
    axes = [[cell.strip() for cell in line if cell.strip()][1] for line in cells]
    assert axes == ["dp, DCN", "fsdp"]


def test_a_step_waits_for_slices_where_it_receives():
    found = timeline(text_of(across("ALL_REDUCE")), mesh_of(dp=2, fsdp=4))
    (sent,) = [each for each in found.operations if each.kind == "all-reduce"]
    assert sent.stream == "DCN dp"
    # One message there and one back, of 50 µs each, and 400 bytes.
    assert sent.each == pytest.approx(2 * 5e-5 + 400 / (3.125e9 * 0.85))
    assert 0 < sent.exposed < sent.each  # an operation runs before recv-done
