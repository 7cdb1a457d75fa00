# SPDX-License-Identifier: Apache-2.0
import inspect

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from tessera.analysis.collective import Total
from tessera.analysis.ledger import collectives
from tessera.errors import MeshShapeError
from tessera.mesh import Mesh

# What was compiled elsewhere has the lines of elsewhere.
pytestmark = pytest.mark.usefixtures("compiled_here")


@pytest.fixture
def mesh():
    return Mesh(["dp", "tp"], devices=range(8), shape=[2, 4])


def placed(mesh, *spec):
    return NamedSharding(mesh.compile_mesh, PartitionSpec(*spec))


def array(mesh, shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=placed(mesh, *spec))


def ledger_of(function, mesh, *arguments, out=None):
    step = jax.jit(function, out_shardings=out)
    return collectives(step.lower(*arguments).compile(), mesh)


def essence(ledger):
    return [(r.kind, r.axes, r.nbytes, r.calls, r.conditional) for r in ledger.rows]


def the_line_of(function, text):
    lines, first = inspect.getsourcelines(function)
    (found,) = [i for i, line in enumerate(lines) if text in line]
    return f"{inspect.getsourcefile(function)}:{first + found}"


def block(mesh):
    """Megatron's pair: the first weight is split by columns, the second by rows."""

    def apply(x, up, down):
        y = jnp.tanh(x @ up) @ down
        return lax.with_sharding_constraint(y, placed(mesh, "dp"))

    return apply


# --- what programs of this JAX send


def test_a_data_parallel_gradient_is_one_all_reduce_of_the_weights_size():
    mesh = Mesh(["dp"], devices=range(8))

    def gradient(w, x):
        return jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)

    w, x = array(mesh, (4, 8)), array(mesh, (16, 4), "dp")
    ledger = ledger_of(gradient, mesh, w, x, out=placed(mesh))
    assert essence(ledger) == [("all-reduce", ("dp",), 4 * 8 * 4, 1, False)]
    assert ledger.rows[0].group_size == 8
    assert ledger.rows[0].source == the_line_of(gradient, "x @ w")


def test_a_sharded_weight_is_gathered_whole():
    mesh = Mesh(["fsdp"], devices=range(8))

    def forward(w, x):
        return x @ lax.with_sharding_constraint(w, placed(mesh))

    w, x = array(mesh, (32, 16), "fsdp"), array(mesh, (16, 32), "fsdp")
    ledger = ledger_of(forward, mesh, w, x, out=placed(mesh, "fsdp"))
    assert essence(ledger) == [("all-gather", ("fsdp",), 32 * 16 * 4, 1, False)]
    assert ledger.rows[0].source == the_line_of(forward, "x @ lax")


def test_a_column_and_a_row_matmul_cost_one_all_reduce(mesh):
    x, up = array(mesh, (8, 16), "dp"), array(mesh, (16, 32), None, "tp")
    down = array(mesh, (32, 16), "tp")
    ledger = ledger_of(block(mesh), mesh, x, up, down)
    assert essence(ledger) == [("all-reduce", ("tp",), 8 // 2 * 16 * 4, 1, False)]
    assert str(ledger.rows[0].arrays[0]) == "f32[4,16]"


def test_collectives_in_nested_scans_count_their_lengths(mesh):
    def forward(x, ups, downs):
        def layers(x, _):
            return lax.scan(lambda x, w: (block(mesh)(x, *w), None), x, (ups, downs))

        return lax.scan(layers, x, None, length=3)[0]

    x, ups = array(mesh, (8, 16), "dp"), array(mesh, (5, 16, 32), None, None, "tp")
    downs = array(mesh, (5, 32, 16), None, "tp")
    ledger = ledger_of(forward, mesh, x, ups, downs)
    assert essence(ledger) == [("all-reduce", ("tp",), 256, 15, False)]
    assert ledger.total_bytes == 15 * 256


def manual(function, mesh, out):
    spec = PartitionSpec("dp", "tp")
    return jax.shard_map(function, mesh=mesh.jax, in_specs=spec, out_specs=out)


def test_each_kind_of_collective_has_its_axes_and_bytes(mesh):
    def kinds(x):  # f32[16, 8] on each device
        ring = [(i, (i + 1) % 4) for i in range(4)]
        return (
            lax.ppermute(x, "tp", ring),
            lax.ppermute(x, "dp", [(0, 1), (1, 0)]),
            lax.psum_scatter(x, "tp", tiled=True),
            lax.all_gather(x, ("dp", "tp"), tiled=True),
            lax.all_to_all(x, "tp", 0, 0, tiled=True),
            lax.pmax(x, ("tp", "dp")),
        )

    split, both = PartitionSpec("dp", "tp"), PartitionSpec(("dp", "tp"))
    out = (split, split, split, both, split, PartitionSpec())
    ledger = ledger_of(
        manual(kinds, mesh, out), mesh, array(mesh, (32, 32), "dp", "tp")
    )
    size = 16 * 8 * 4
    assert sorted(essence(ledger)) == [
        ("all-gather", ("dp", "tp"), 8 * size, 1, False),
        ("all-reduce", ("dp", "tp"), size, 1, False),
        ("all-to-all", ("tp",), size, 1, False),
        ("collective-permute", ("dp",), size, 1, False),
        ("collective-permute", ("tp",), size, 1, False),
        ("reduce-scatter", ("tp",), size, 1, False),
    ]
    lines = {(row.kind, row.axes): row.source for row in ledger.rows}
    assert lines["reduce-scatter", ("tp",)] == the_line_of(kinds, "psum_scatter")


def test_a_collective_in_a_loop_of_unknown_length_counts_once_and_says_so(mesh):
    def until(x):
        def swap(y):
            return lax.ppermute(y, "tp", [(0, 1), (1, 0), (2, 3), (3, 2)]) + 1.0

        return lax.while_loop(lambda y: y.sum() < 10.0, swap, x)

    spec = PartitionSpec("dp", "tp")
    ledger = ledger_of(
        manual(until, mesh, spec), mesh, array(mesh, (8, 16), "dp", "tp")
    )
    assert essence(ledger) == [("collective-permute", ("tp",), 64, None, False)]
    assert ledger.total_bytes == 64
    assert "≥1" in ledger.as_text()
    assert "≥: in a loop of unknown length, which counts once" in ledger.as_text()


def test_a_collective_in_a_branch_is_marked(mesh):
    def branch(x):
        def send(y):
            return lax.ppermute(y, "tp", [(0, 1)])

        return lax.cond(lax.axis_index("dp") == 0, send, lambda y: y * 2.0, x)

    spec = PartitionSpec("dp", "tp")
    ledger = ledger_of(
        manual(branch, mesh, spec), mesh, array(mesh, (8, 16), "dp", "tp")
    )
    assert essence(ledger) == [("collective-permute", ("tp",), 64, 1, True)]
    assert "≤1" in ledger.as_text()


def test_collectives_that_xla_combined_are_one_row(mesh):
    def sums(x):
        return lax.psum((x, x.sum(0)), "tp")

    out = (PartitionSpec("dp"), PartitionSpec("dp"))
    ledger = ledger_of(manual(sums, mesh, out), mesh, array(mesh, (8, 16), "dp", "tp"))
    (row,) = ledger.rows
    assert [str(shape) for shape in row.arrays] == ["f32[4,4]", "f32[4]"]
    assert row.nbytes == 64 + 16
    assert "2 arrays" in ledger.as_text()


def test_groups_are_positions_in_the_mesh_whatever_the_device_ids():
    mesh = Mesh(["dp", "tp"], devices=[[7, 3, 5, 1], [0, 2, 4, 6]])
    x, w = array(mesh, (8, 16), "dp", "tp"), array(mesh, (16, 8), "tp")
    ledger = ledger_of(lambda x, w: x @ w, mesh, x, w, out=placed(mesh, "dp"))
    assert essence(ledger) == [("all-reduce", ("tp",), 4 * 8 * 4, 1, False)]


def test_axes_of_size_one_are_never_named():
    mesh = Mesh(["pp", "dp", "tp"], devices=range(8), shape=[1, 8, 1])
    x = array(mesh, (8, 16), "dp", "tp")
    ledger = ledger_of(lambda x: x.sum(0), mesh, x, out=placed(mesh))
    assert essence(ledger) == [("all-reduce", ("dp",), 64, 1, False)]


def test_a_program_that_sends_nothing_has_an_empty_ledger(mesh):
    x = array(mesh, (8, 16), "dp")
    ledger = ledger_of(jnp.tanh, mesh, x)
    assert ledger.rows == ()
    assert ledger.totals() == {}
    assert ledger.as_text() == "no collectives"


# --- what this JAX does not print


def read(mesh, *lines, devices=8):
    header = f"HloModule m, num_partitions={devices}"
    return collectives("\n".join([header, "ENTRY e {", *lines, "}"]), mesh)


def test_an_asynchronous_pair_is_one_collective(mesh):
    ledger = read(
        mesh,
        "  x = bf16[2,64]{1,0:T(8,128)(2,1)} parameter(0)",
        "  s = (bf16[2,64]{1,0}, bf16[8,64]{1,0}) all-gather-start(x), "
        "replica_groups=[2,4]<=[8], dimensions={0}",
        "  d = bf16[8,64]{1,0} all-gather-done(s)",
        "  r = bf16[8,64]{1,0} all-reduce-start(d), "
        "replica_groups={{0,4},{1,5},{2,6},{3,7}}",
        "  t = bf16[8,64]{1,0} all-reduce-done(r)",
        "  p = (bf16[8,64], bf16[8,64], u32[], u32[]) collective-permute-start(t), "
        "source_target_pairs={{0,1},{1,0}}",
        "  ROOT q = bf16[8,64] collective-permute-done(p)",
    )
    assert essence(ledger) == [
        ("all-gather", ("tp",), 8 * 64 * 2, 1, False),
        ("all-reduce", ("dp",), 8 * 64 * 2, 1, False),
        ("collective-permute", ("tp",), 8 * 64 * 2, 1, False),
    ]


def test_an_asynchronous_gather_of_several_arrays_counts_its_results(mesh):
    ledger = read(
        mesh,
        "  x = f32[2] parameter(0)",
        "  y = f32[3] parameter(1)",
        "  ROOT s = ((f32[2], f32[3]), (f32[8], f32[12])) all-gather-start(x, y), "
        "replica_groups=[2,4]<=[8], dimensions={0}",
    )
    assert [str(shape) for shape in ledger.rows[0].arrays] == ["f32[8]", "f32[12]"]


def test_an_asynchronous_wrapper_counts_what_it_wraps(mesh):
    text = """HloModule m, num_partitions=8
wrapped {
  x = f32[8] parameter(0)
  ROOT y = f32[2] reduce-scatter(x), replica_groups=[2,4]<=[8], to_apply=add
}

ENTRY e {
  x = f32[8] parameter(0)
  s = ((f32[8]), f32[2], u32[]) async-start(x), calls=wrapped
  ROOT d = f32[2] async-done(s), calls=wrapped
}"""
    assert essence(collectives(text, mesh)) == [
        ("reduce-scatter", ("tp",), 32, 1, False)
    ]


def test_a_permute_that_xla_took_apart_is_found_by_its_send(mesh):
    ledger = read(
        mesh,
        "  x = f32[16] parameter(0)",
        "  t = token[] after-all()",
        "  s = (f32[16], u32[], token[]) send(x, t), channel_id=1, frontend_attributes="
        '{_xla_send_recv_pipeline="0",_xla_send_recv_source_target_pairs={{0,4},{4,0}}}',
        "  ROOT d = token[] send-done(s), channel_id=1",
    )
    assert essence(ledger) == [("collective-permute", ("dp",), 64, 1, False)]


def test_no_groups_at_all_are_every_device(mesh):
    ledger = read(mesh, "  ROOT r = f32[4] all-reduce(x), replica_groups={}")
    assert ledger.rows[0].axes == ("dp", "tp")


def test_groups_of_one_device_send_nothing(mesh):
    ledger = read(
        mesh,
        "  x = f32[4] parameter(0)",
        "  r = f32[4] all-reduce(x), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}",
        "  p = f32[4] collective-permute(x), source_target_pairs={{0,0},{1,1}}",
        "  ROOT q = f32[4] collective-permute(x), source_target_pairs={}",
    )
    assert ledger.rows == ()


def test_a_part_of_an_axis_is_named_with_its_size(mesh):
    ledger = read(
        mesh,
        "  x = f32[4] parameter(0)",
        "  ROOT r = f32[4] all-reduce(x), replica_groups=mesh['tp'=8] {'tp':(4)2}",
    )
    assert (ledger.rows[0].axes, ledger.rows[0].group_size) == (("tp",), 2)
    assert "all-reduce  tp (2 of 4)  f32[4]" in ledger.as_text()


def test_devices_that_the_mesh_lacks_are_on_no_axis(mesh):
    text = """HloModule m
ENTRY e {
  x = f32[4] parameter(0)
  ROOT r = f32[4] all-reduce(x), replica_groups=[2,8]<=[16]
}"""
    ledger = collectives(text, mesh)
    assert (ledger.rows[0].axes, ledger.rows[0].group_size) == (("?",), 8)
    assert "all-reduce  ?     f32[4]" in ledger.as_text()


def test_a_kind_that_is_not_known_is_listed_as_unknown(mesh):
    ledger = read(
        mesh,
        "  x = f32[4] parameter(0)",
        "  y = f32[4] all-shuffle-start(x), replica_groups=[2,4]<=[8]",
        "  ROOT r = f32[4] all-shuffle-done(y)",
    )
    assert essence(ledger) == [("unknown: all-shuffle", ("tp",), 16, 1, False)]
    assert "unknown: a kind that Tessera does not know" in ledger.as_text()


@pytest.mark.parametrize("groups", ["replica_groups=<0,1>", "devices={{0,1}}"])
def test_groups_in_an_unknown_syntax_are_on_unknown_axes(mesh, groups):
    ledger = read(
        mesh,
        "  x = f32[4] parameter(0)",
        f"  ROOT r = f32[4] all-reduce(x), {groups}",
    )
    assert essence(ledger) == [("all-reduce", ("?",), 16, 1, False)]


def test_an_operation_that_is_not_known_is_passed_over(mesh):
    ledger = read(
        mesh,
        "  x = f32[4] parameter(0)",
        "  y = f32[4] shimmer(x), hue={1,2}",
        "  ROOT r = f32[4] all-reduce(y), replica_groups=[2,4]<=[8]",
    )
    assert essence(ledger) == [("all-reduce", ("tp",), 16, 1, False)]


def test_a_long_name_is_shown_from_its_end(mesh):
    name = "jit(f)/" + "/".join(f"layer_{i}" for i in range(20))
    ledger = read(
        mesh,
        "  x = f32[4] parameter(0)",
        "  ROOT r = f32[4] all-reduce(x), replica_groups={}, "
        f'metadata={{op_name="{name}" source_file="m.py" source_line=1}}',
    )
    assert ledger.rows[0].op_name == name
    assert ledger.as_text().splitlines()[1].endswith("layer_18/layer_19")


def test_the_mesh_of_another_program_is_refused(mesh):
    line = "  ROOT r = f32[4] all-reduce(x), replica_groups=[2,2]<=[4]"
    with pytest.raises(MeshShapeError) as raised:
        read(mesh, line, devices=4)
    assert str(raised.value) == (
        "[T101] the mesh is not the one that the program was compiled for\n"
        "  got: dp × tp mesh, 2 × 4 = 8 devices, a program for 4\n"
        "  fix: pass the mesh that the program was lowered on\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T101.html"
    )


# --- sums and text


TABLE = """\
collective  axes  arrays     calls     bytes  reason     line      op
all-reduce  tp    f32[256]       1  1.00 KiB  sum        b/m.py:3  f/dot
all-reduce  tp    f32[256]       1  1.00 KiB  sum        b/m.py:4  f/sum
all-gather  tp    f32[1024]      1  4.00 KiB  UNPLANNED  b/m.py:5  f/gather
all-reduce  dp    f32[256]       1  1.00 KiB  sum        b/m.py:6  f/mean

axes  collective  operations  calls  bytes per device
tp    all-reduce           2      2          2.00 KiB
tp    all-gather           1      1          4.00 KiB
tp    together             3      3          6.00 KiB
dp    all-reduce           1      1          1.00 KiB
UNPLANNED: 1 that no declared layout implies"""

LINES = (
    "  x = f32[256] parameter(0)",
    "  a = f32[256] all-reduce(x), replica_groups=[2,4]<=[8], "
    'metadata={op_name="f/dot" source_file="/a/b/m.py" source_line=3}',
    "  b = f32[256] all-reduce(a), replica_groups=[2,4]<=[8], "
    'metadata={op_name="f/sum" source_file="/a/b/m.py" source_line=4}',
    "  c = f32[1024] all-gather(x), replica_groups=[2,4]<=[8], dimensions={0}, "
    'metadata={op_name="f/gather" source_file="/a/b/m.py" source_line=5}',
    "  ROOT d = f32[256] all-reduce(b), replica_groups=[4,2]<=[2,4]T(1,0), "
    'metadata={op_name="f/mean" source_file="/a/b/m.py" source_line=6}',
)


def test_sums_per_axis_and_per_kind(mesh):
    ledger = read(mesh, *LINES)
    assert ledger.by_axis() == {
        ("tp",): Total(operations=3, calls=3, nbytes=2048 + 4096),
        ("dp",): Total(operations=1, calls=1, nbytes=1024),
    }
    assert ledger.totals() == {
        (("tp",), "all-reduce"): Total(operations=2, calls=2, nbytes=2048),
        (("tp",), "all-gather"): Total(operations=1, calls=1, nbytes=4096),
        (("dp",), "all-reduce"): Total(operations=1, calls=1, nbytes=1024),
    }
    assert ledger.total_bytes == 2048 + 4096 + 1024


def test_the_table_is_aligned_and_ends_with_its_sums(mesh):
    ledger = read(mesh, *LINES)
    assert ledger.as_text() == str(ledger) == repr(ledger) == TABLE
