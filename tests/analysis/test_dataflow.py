# SPDX-License-Identifier: Apache-2.0
import pytest

from tessera.analysis import hlo
from tessera.analysis.dataflow import RESULT, Dataflow
from tessera.analysis.hlo_walk import Node

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
  weights = f32[8] get-tuple-element(loop), index=1
  chosen = f32[8] conditional(i, last, weights), branch_computations={taken, other}
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


def test_definitions_are_found_through_tuples_loops_fusions_and_branches(module):
    flow = Dataflow(module)
    assert names(flow.definitions(node(module, "weights"))) == ["weight"]
    # What a loop carries is its initial value, or what an iteration computes.
    assert names(flow.definitions(node(module, "last"))) == ["v", "x"]
    assert names(flow.definitions(*node(module, "r").operands())) == [
        "v",
        "weight",
        "x",
    ]


def test_an_operation_in_a_loop_finds_its_operands_outside(module):
    flow = Dataflow(module)
    (product,) = [n for n in flow.definitions(node(module, "last")) if len(n.path) > 1]
    assert [i.name for _, i in product.path] == ["loop", "f", "v"]
    # The product of one iteration is an operand of the next.
    assert names(flow.definitions(*product.operands())) == ["v", "weight", "x"]


def test_uses_of_a_value_are_found_through_loops_fusions_and_branches(module):
    flow = Dataflow(module)
    assert names(flow.uses(node(module, "weight"))) == ["r", "v"]
    assert names(flow.uses(node(module, "last"))) == ["r"]


def test_what_the_program_returns_has_that_use(module):
    (result,) = Dataflow(module).uses(node(module, "r"))
    assert result.element == RESULT


def test_an_element_of_a_tuple_may_be_an_operand():
    text = """HloModule m
ENTRY e {
  x = f32[8] parameter(0)
  y = f32[8] parameter(1)
  t = (f32[8], f32[8]) tuple(x, y)
  ROOT r = f32[8] negate(t#1)
}"""
    module = hlo.parse(text)
    flow = Dataflow(module)
    assert names(flow.definitions(*node(module, "r").operands())) == ["y"]
    assert names(flow.uses(node(module, "y"))) == ["r"]
    assert names(flow.uses(node(module, "x"))) == []
