# SPDX-License-Identifier: Apache-2.0
import jax
import jax.numpy as jnp
import pytest

from tessera.analysis import hlo
from tessera.analysis.hlo_walk import executions
from tessera.analysis.loop_counts import LoopCounts


def runs(text, opcode):
    module = hlo.parse("HloModule m\n" + text)
    counts = LoopCounts(module)
    return [
        counts.calls(node)
        for node in executions(module)
        if node.instruction.opcode == opcode
    ]


def trips(n):
    return f'backend_config={{"known_trip_count":{{"n":"{n}"}}}}'


def test_nested_loops_multiply():
    text = f"""
inner {{
  x = f32[2] parameter(0)
  ROOT y = f32[2] negate(x)
}}

outer {{
  x = f32[2] parameter(0)
  ROOT y = f32[2] while(x), condition=c, body=inner, {trips(4)}
}}

ENTRY e {{
  x = f32[2] parameter(0)
  y = f32[2] negate(x)
  ROOT z = f32[2] while(y), condition=c, body=outer, {trips(3)}
}}"""
    assert runs(text, "negate") == [1, 12]


def calls_in_loop(function, *arguments):
    text = jax.jit(function).lower(*arguments).compile().as_text()
    module = hlo.parse(text)
    counts = LoopCounts(module)
    return {
        counts.calls(node)
        for node in executions(module)
        if "while" in [outer.opcode for _, outer in node.path[:-1]]
    }


@pytest.mark.parametrize("reverse", [False, True])
def test_xla_records_how_often_a_scan_and_its_gradient_run(reverse):
    def scanned(x):
        carried, rows = jax.lax.scan(
            lambda c, _: (jnp.tanh(c), c.sum()), x, None, length=6, reverse=reverse
        )
        return carried.sum() + rows.sum()

    assert calls_in_loop(jax.grad(scanned), jnp.ones((4, 4))) == {6}


def test_xla_records_how_often_a_loop_between_constants_runs():
    def doubled(x):
        return jax.lax.fori_loop(2, 7, lambda i, y: y * 2.0 + i, x)

    assert calls_in_loop(doubled, jnp.ones(3)) == {5}


def test_a_loop_until_a_value_is_reached_is_unknown():
    def doubled(x):
        return jax.lax.while_loop(lambda y: y.sum() < 9.0, lambda y: y * 2.0, x)

    assert calls_in_loop(doubled, jnp.ones(3)) == {None}


def test_a_loop_of_unknown_length_makes_its_body_unknown():
    text = """
inner {
  x = f32[2] parameter(0)
  ROOT y = f32[2] negate(x)
}

c {
  x = f32[2] parameter(0)
  ROOT y = pred[] custom-call(x), custom_call_target="done"
}

ENTRY e {
  x = f32[2] parameter(0)
  ROOT z = f32[2] while(x), condition=c, body=inner
}"""
    assert runs(text, "negate") == [None]


COUNTED = """
{name} {{
  p = (s32[], f32[2]) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  x = f32[2] get-tuple-element(p), index=1
  one = s32[] constant(1)
  j = s32[] add(i, one)
  y = f32[2] {inside}
  ROOT r = (s32[], f32[2]) tuple(j, y)
}}

{name}_condition {{
  p = (s32[], f32[2]) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  n = s32[] constant({count})
  ROOT c = pred[] compare(i, n), direction=LT
}}
"""
START = """
  zero = s32[] constant(0)
  s = (s32[], f32[2]) tuple(zero, x)
  of_{name} = (s32[], f32[2]) while(s), condition={name}_condition, body={name}
"""


def test_a_loop_of_which_xla_records_nothing_is_counted_by_its_constants():
    # As a TPU's compiler writes it: one loop in a function that another one calls.
    text = (
        COUNTED.format(name="inner", inside="negate(x)", count=5)
        + "function {\n  x = f32[2] parameter(0)"
        + START.format(name="inner")
        + "  ROOT y = f32[2] get-tuple-element(of_inner), index=1\n}\n"
        + COUNTED.format(name="outer", inside="call(x), to_apply=function", count=3)
        + "ENTRY e {\n  x = f32[2] parameter(0)\n  a = f32[2] abs(x)"
        + START.format(name="outer").replace("of_outer =", "ROOT of_outer =")
        + "}"
    )
    assert runs(text, "abs") == [1]
    assert runs(text, "negate") == [15]


def test_a_loop_with_a_count_for_each_place_that_runs_it_is_unknown():
    body = COUNTED.format(name="body", inside="negate(x)", count=7)
    text = (
        body
        + """
function {
  zero = s32[] parameter(0)
  x = f32[2] parameter(1)
  s = (s32[], f32[2]) tuple(zero, x)
  w = (s32[], f32[2]) while(s), condition=body_condition, body=body
  ROOT y = f32[2] get-tuple-element(w), index=1
}

ENTRY e {
  x = f32[2] parameter(0)
  two = s32[] constant(2)
  four = s32[] constant(4)
  a = f32[2] call(two, x), to_apply=function
  ROOT b = f32[2] call(four, a), to_apply=function
}"""
    )
    assert runs(text, "negate") == [None, None]
