# SPDX-License-Identifier: Apache-2.0
import pytest

from tessera.analysis import hlo
from tessera.analysis.dataflow import RESULT, Dataflow, Node

MODULE = """HloModule m

scaled {
  s = f32[8] parameter(0)
  u = f32[8] parameter(1)
  ROOT v = f32[8] multiply(s, u)
}

taken {
  ROOT k = f32[8] parameter(0)
}

other {
  ROOT k = f32[8] parameter(0)
}

body {
  p = (f32[8], f32[8]) parameter(0)
  a = f32[8] get-tuple-element(p), index=0
  w = f32[8] get-tuple-element(p), index=1
  f = f32[8] fusion(a, w), kind=kLoop, calls=scaled
  ROOT t = (f32[8], f32[8]) tuple(f, w)
}

ENTRY e {
  x = f32[8] parameter(0)
  weight = f32[8] parameter(1)
  i = s32[] parameter(2)
  init = (f32[8], f32[8]) tuple(x, weight)
  loop = (f32[8], f32[8]) while(init), condition=taken, body=body
  last = f32[8] get-tuple-element(loop), index=0
  held = f32[8] get-tuple-element(loop), index=1
  chosen = f32[8] conditional(i, last, held), branch_computations={taken, other}
  ROOT r = f32[8] negate(chosen)
}
"""


@pytest.fixture
def module():
    return hlo.parse(MODULE)


def node(module, name, element=None):
    entry = module.computations["e"]
    return Node(((entry, entry.instructions[name]),), element)


def names(nodes):
    return sorted({each.instruction.name for each in nodes})


def test_a_value_is_followed_back_through_tuples_loops_fusions_and_branches(module):
    flow = Dataflow(module)
    assert names(flow.written(node(module, "held"))) == ["weight"]
    # What a loop carries is its first value, or what a turn makes of it.
    assert names(flow.written(node(module, "last"))) == ["v", "x"]
    assert names(flow.operands(node(module, "r"))) == ["v", "weight", "x"]


def test_an_operation_inside_knows_what_it_reads_outside(module):
    flow = Dataflow(module)
    (product,) = [n for n in flow.written(node(module, "last")) if len(n.frames) > 1]
    assert [i.name for _, i in product.frames] == ["loop", "f", "v"]
    # The product of one turn is an operand of the next.
    assert names(flow.operands(product)) == ["v", "weight", "x"]


def test_a_value_is_followed_on_to_what_computes_with_it(module):
    flow = Dataflow(module)
    assert names(flow.read(node(module, "weight"))) == ["r", "v"]
    assert names(flow.read(node(module, "last"))) == ["r"]


def test_what_the_program_returns_is_read_by_nobody_else(module):
    (result,) = Dataflow(module).read(node(module, "r"))
    assert result.element == RESULT


def test_elements_of_a_tuple_are_named_with_a_number_by_newer_xla():
    text = """HloModule m
ENTRY e {
  x = f32[8] parameter(0)
  y = f32[8] parameter(1)
  t = (f32[8], f32[8]) tuple(x, y)
  ROOT r = f32[8] negate(t#1)
}"""
    module = hlo.parse(text)
    flow = Dataflow(module)
    assert names(flow.operands(node(module, "r"))) == ["y"]
    assert names(flow.read(node(module, "y"))) == ["r"]
    assert names(flow.read(node(module, "x"))) == []
