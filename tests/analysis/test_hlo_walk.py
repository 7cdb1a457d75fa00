# SPDX-License-Identifier: Apache-2.0
import pytest

from tessera.analysis import hlo
from tessera.analysis.dataflow import Dataflow
from tessera.analysis.hlo_walk import cause, executions

LINE = 'metadata={op_name="%s" source_file="me.py" source_line=%d}'


def runs(text, opcode):
    flow = Dataflow(hlo.parse("HloModule m\n" + text))
    return [
        each.is_conditional for each in flow.nodes if each.instruction.opcode == opcode
    ]


@pytest.mark.parametrize(
    "branches",
    [
        "branch_computations={a, b}",
        "branch_computations={%a, %b}",
        "true_computation=a, false_computation=b",
    ],
)
def test_branches_may_be_skipped(branches):
    text = f"""
a {{
  x = f32[2] parameter(0)
  ROOT y = f32[2] negate(x)
}}

b {{
  x = f32[2] parameter(0)
  ROOT y = f32[2] abs(x)
}}

ENTRY e {{
  p = s32[] parameter(0)
  x = f32[2] parameter(1)
  ROOT z = f32[2] conditional(p, x, x), {branches}
}}"""
    assert runs(text, "negate") == runs(text, "abs") == [True]


def test_an_asynchronous_computation_runs_once():
    text = """
wrapped {
  x = f32[8] parameter(0)
  ROOT y = f32[4] reduce-scatter(x), replica_groups={{0,1}}, to_apply=add
}

ENTRY e {
  x = f32[8] parameter(0)
  s = ((f32[8]), f32[4], u32[]) async-start(x), calls=wrapped
  u = ((f32[8]), f32[4], u32[]) async-update(s), calls=wrapped
  ROOT d = f32[4] async-done(u), calls=wrapped
}"""
    assert runs(text, "reduce-scatter") == [False]


def test_the_functions_of_reductions_are_not_walked():
    text = """
add {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}

ENTRY e {
  x = f32[8] parameter(0)
  z = f32[] constant(0)
  ROOT y = f32[] reduce(x, z), dimensions={0}, to_apply=add
}"""
    assert runs(text, "add") == []


def cause_of_gather(*lines):
    module = hlo.parse("\n".join(["HloModule m", *lines]))
    (found,) = [e for e in executions(module) if e.instruction.opcode == "all-gather"]
    return cause(module, found).op_name


def test_a_collective_with_a_line_of_its_own_is_its_own_cause():
    assert (
        cause_of_gather(
            "ENTRY e {",
            "  x = f32[2] parameter(0)",
            "  g = f32[4] all-gather(x), " + LINE % ("own", 1),
            "  ROOT y = f32[4] negate(g), " + LINE % ("reader", 2),
            "}",
        )
        == "own"
    )


def test_a_collective_without_a_line_exists_for_its_nearest_reader():
    assert (
        cause_of_gather(
            "ENTRY e {",
            "  x = f32[2] abs(w), " + LINE % ("source", 1),
            "  g = f32[4] all-gather(x)",
            "  c = f32[4] copy(g)",
            "  ROOT y = f32[4] negate(c), " + LINE % ("reader", 2),
            "}",
        )
        == "reader"
    )


def test_a_collective_that_nothing_with_a_line_reads_belongs_to_its_operand():
    assert (
        cause_of_gather(
            "ENTRY e {",
            "  x = f32[2] abs(w), " + LINE % ("source", 1),
            "  ROOT g = f32[4] all-gather(x)",
            "}",
        )
        == "source"
    )


def test_a_collective_alone_in_a_loop_belongs_to_the_loop():
    assert (
        cause_of_gather(
            "body {",
            "  x = f32[2] parameter(0)",
            "  ROOT g = f32[4] all-gather(x)",
            "}",
            "ENTRY e {",
            "  x = f32[2] parameter(0)",
            "  ROOT z = f32[4] while(x), body=body, " + LINE % ("loop", 3),
            "}",
        )
        == "loop"
    )
