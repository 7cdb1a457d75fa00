# SPDX-License-Identifier: Apache-2.0
import pytest

from tessera.analysis.ledger import collectives
from tessera.analysis.tables import WIDTH
from tessera.errors import MeshShapeError
from tessera.mesh import Mesh
from tessera.targets.target import Target

INSIDE, ACROSS = "replica_groups=[2,8]<=[16]", "replica_groups=[8,2]<=[2,8]T(1,0)"
MEGABYTE = "f32[250000]"


def metadata(name, file):
    return f'metadata={{op_name="{name}" source_file="{file}" source_line=3}}'


SUM = metadata("f/sum", "m.py")


def ledger(*operations, target="h100:2x8", axes=("dp", "tp"), shape=(2, 8), source=SUM):
    lines = [
        f"  r{i} = {MEGABYTE} {operation}, {source}".removesuffix(", ")
        for i, operation in enumerate(operations)
    ]
    entry = ["ENTRY e {", f"  x = {MEGABYTE} parameter(0)", *lines, "}"]
    text = "\n".join(["HloModule m, num_partitions=16", *entry])
    return collectives(text, Mesh(axes, shape=shape, target=target))


def test_collectives_that_are_alike_are_one_line_and_several_rows():
    found = ledger(*[f"all-reduce(x), {INSIDE}"] * 3, f"all-reduce(x), {ACROSS}")
    assert len(found.rows) == 4
    lines = found.as_text().splitlines()
    assert lines[1].split()[:8] == [
        *("all-reduce", "tp", MEGABYTE, "3", "×", "1", "2.86", "MiB")
    ]
    assert lines[2].split()[:3] == ["all-reduce", "dp,", "InfiniBand"]


def test_the_same_collective_of_every_layer_is_one_line():
    def of(layer, operation):
        name = f"jit(step)/transpose(jvp(decoder))/layers_{layer}/mlp/{operation}"
        return metadata(name, "a/long/way/down/in/the/package/model_of_layers.py")

    operations = "dot_general", "dot_general", "add_any"
    found = ledger(
        *[f"all-reduce(x), {INSIDE}, {of(i, op)}" for i, op in enumerate(operations)],
        source="",
    )
    text = found.as_text()
    first, second = text.splitlines()[1:3]
    assert first.split()[3:8] == ["2", "×", "1", "1.91", "MiB"]
    assert first.endswith("dot_general")
    assert second.endswith("/mlp/add_any")
    assert max(map(len, text.splitlines())) <= WIDTH
    assert len(found.rows) == 3


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("v5e:4x4", "compiled for v5e:4x4"),
        (
            Target.parse("h100:2x8", compiler="cpu"),
            "compiled for CPU, in place of h100:2x8",
        ),
        (None, ""),
    ],
)
def test_the_compiler_of_the_program_is_named(target, said):
    found = ledger(f"all-reduce(x), {INSIDE}", target=target)
    assert said in found.summary()
    assert ("compiled for" in found.summary()) == bool(said)


def test_asynchronous_pairs_are_told_from_those_that_are_waited_for_at_once():
    sync = 'backend_config={"collective_backend_config":{"is_sync":true}}'
    found = ledger(
        f"all-reduce-start(x), {INSIDE}", f"all-reduce-start(x), {INSIDE}, {sync}"
    )
    assert [row.is_async for row in found.rows] == [True, False]
    assert "async all-reduce" in found.as_text()


def test_devices_that_a_target_lacks_are_on_no_known_axis():
    text = """HloModule m
ENTRY e {
  x = f32[4] parameter(0)
  ROOT r = f32[4] all-reduce(x), replica_groups=[2,16]<=[32]
}"""
    (row,) = collectives(text, Mesh(["dp"], shape=(16,), target="h100:2x8")).rows
    assert row.axes == ("?",)


def test_a_program_for_more_devices_than_the_target_has_is_refused():
    text = """HloModule m, num_partitions=32
ENTRY e {
  x = f32[4] parameter(0)
  ROOT r = f32[4] all-reduce(x), replica_groups=[2,16]<=[32]
}"""
    with pytest.raises(MeshShapeError, match="T101"):
        collectives(text, Mesh(["dp"], shape=(16,), target="h100:2x8"))
