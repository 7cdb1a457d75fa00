# SPDX-License-Identifier: Apache-2.0
"""A TPU writes an asynchronous collective several times, and it runs once."""

from tessera.analysis import hlo
from tessera.analysis.asynchronous_fusions import AsynchronousFusions
from tessera.analysis.hlo_walk import executions
from tessera.analysis.ledger import collectives
from tessera.mesh import Mesh

GATHER = (
    "all-gather(p), channel_id={}, replica_groups=[1,8]<=[8], dimensions={{0}}, "
    'backend_config={{"async_collective_fusion_config":{{}}}}'
)
STATE = "(f32[8,4], u32[])"


def parts(name, channel):
    gather = GATHER.format(channel)
    return f"""
{name}_first {{
  p = f32[1,4] parameter(0)
  g = f32[8,4] {gather}
  ROOT r = {STATE} custom-call(g), custom_call_target="AsyncCollectiveStart"
}}

{name}_middle {{
  p = f32[1,4] parameter(0)
  g = f32[8,4] {gather}
  ROOT r = f32[1,4] negate(p)
}}

{name}_last {{
  p = f32[1,4] parameter(0)
  g = f32[8,4] {gather}
  ROOT r = f32[8,4] custom-call(g), custom_call_target="AsyncCollectiveDone"
}}
"""


TEXT = (
    "HloModule m, num_partitions=8"
    + parts("a", 7)
    + parts("b", 8)
    + f"""
ENTRY e {{
  x = f32[1,4] parameter(0)
  s = {STATE} fusion(x), kind=kCustom, calls=a_first
  t = {STATE} fusion(x), kind=kCustom, calls=b_first
  m = f32[1,4] fusion(x), kind=kOutput, calls=a_middle
  n = f32[1,4] fusion(x), kind=kOutput, calls=a_middle
  d = f32[8,4] fusion(x), kind=kCustom, calls=a_last
  ROOT f = f32[8,4] fusion(x), kind=kCustom, calls=b_last
}}"""
)


def test_a_collective_in_several_fusions_counts_once():
    rows = collectives(TEXT, Mesh(["fsdp"], devices=range(8))).rows
    assert [(row.kind, row.nbytes, row.calls) for row in rows] == [
        ("all-gather", 8 * 4 * 4, 1),
        ("all-gather", 8 * 4 * 4, 1),
    ]
    assert all(row.is_async for row in rows)


def test_each_start_has_the_end_of_its_channel():
    nodes = tuple(executions(hlo.parse(TEXT)))
    fusions = AsynchronousFusions(nodes)
    gathers = [node for node in nodes if node.instruction.opcode == "all-gather"]
    callers = [node.caller().instruction.name for node in gathers]
    ends = [fusions.end(node).instruction.name for node in gathers]
    assert dict(zip(callers, ends, strict=True)) == {
        **{"s": "d", "t": "f"},
        **dict.fromkeys("mndf", "g"),
    }


def test_no_part_is_left_out_of_a_collective_that_starts_nowhere():
    text = TEXT.replace("AsyncCollectiveStart", "Other")
    assert len(collectives(text, Mesh(["fsdp"], devices=range(8))).rows) == 6


def test_a_collective_of_an_unknown_kind_counts_once_too():
    text = TEXT.replace(" all-gather(", " all-shuffle(")
    rows = collectives(text, Mesh(["fsdp"], devices=range(8))).rows
    assert [row.kind for row in rows] == ["unknown: all-shuffle"] * 2
