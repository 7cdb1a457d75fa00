# SPDX-License-Identifier: Apache-2.0
import jax
import jax.numpy as jnp
import pytest

from tessera.analysis import hlo
from tessera.analysis.dataflow import Dataflow
from tessera.analysis.loop_counts import LoopCounts


def runs(text, opcode):
    flow = Dataflow(hlo.parse("HloModule m\n" + text))
    counts = LoopCounts(flow)
    return [
        counts.calls(node) for node in flow.nodes if node.instruction.opcode == opcode
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


def calls_in_loop(function, *arguments, is_recorded=True):
    text = jax.jit(function).lower(*arguments).compile().as_text()
    if not is_recorded:  # as on TPUs
        text = text.replace("known_trip_count", "left_out")
    flow = Dataflow(hlo.parse(text))
    counts = LoopCounts(flow)
    return {
        counts.calls(node)
        for node in flow.nodes
        if "while" in [outer.opcode for _, outer in node.path[:-1]]
    }


@pytest.mark.parametrize("is_recorded", [True, False])
@pytest.mark.parametrize("reverse", [False, True])
def test_how_often_a_scan_and_its_gradient_run_is_known(reverse, is_recorded):
    def scanned(x):
        carried, rows = jax.lax.scan(
            lambda c, _: (jnp.tanh(c), c.sum()), x, None, length=6, reverse=reverse
        )
        return carried.sum() + rows.sum()

    slope = jax.grad(scanned)
    assert calls_in_loop(slope, jnp.ones((4, 4)), is_recorded=is_recorded) == {6}


@pytest.mark.parametrize("is_recorded", [True, False])
def test_how_often_a_loop_between_constants_runs_is_known(is_recorded):
    def doubled(x):
        return jax.lax.fori_loop(2, 7, lambda i, y: y * 2.0 + i, x)

    assert calls_in_loop(doubled, jnp.ones(3), is_recorded=is_recorded) == {5}


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


def test_a_loop_of_which_xla_records_nothing_is_counted_by_its_condition():
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


def test_a_loop_has_a_count_for_each_place_that_runs_it():
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
    assert runs(text, "negate") == [5, 3]


def steps(begin=0, end=12, body="add(i, one)", direction="LT", sides="i, n"):
    loop = COUNTED.format(name="body", inside="negate(x)", count=end)
    loop = loop.replace("add(i, one)", body).replace("direction=LT", direction)
    loop = loop.replace("compare(i, n), ", f"compare({sides}), direction=")
    start = START.format(name="body").replace("constant(0)", f"constant({begin})")
    start = start.replace("of_body =", "ROOT of_body =")
    only = "taken {\n  a = s32[] parameter(0)\n  o = s32[] constant(1)\n"
    only += "  ROOT b = s32[] add(a, o)\n}\nother {\n  ROOT a = s32[] parameter(0)\n}\n"
    return runs(f"{only}{loop}ENTRY e {{\n  x = f32[2] parameter(0){start}}}", "negate")


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({}, 12),
        ({"begin": 5}, 7),
        ({"begin": 12}, 0),
        ({"body": "add(i, i)"}, None),
        ({"body": "subtract(i, one)"}, None),
        ({"direction": "GT", "sides": "n, i"}, 12),
        ({"direction": "GT"}, None),
        ({"direction": "NE"}, None),
        # It counts in some iterations alone.
        (
            {"body": "conditional(i, i, i), branch_computations={taken, other}"},
            None,
        ),
    ],
)
def test_a_loop_is_counted_if_it_counts_in_steps_up_to_a_constant(changes, count):
    assert steps(**changes) == [count]


def test_a_loop_may_count_in_larger_steps():
    loop = COUNTED.format(name="body", inside="negate(x)", count=12)
    loop = loop.replace("one = s32[] constant(1)", "one = s32[] constant(5)")
    start = START.format(name="body").replace("of_body =", "ROOT of_body =")
    text = f"{loop}ENTRY e {{\n  x = f32[2] parameter(0){start}}}"
    assert runs(text, "negate") == [3]


def test_the_copies_of_a_counter_are_followed():
    loop = COUNTED.format(name="body", inside="negate(x)", count=12)
    loop = loop.replace("  j =", "  k = s32[] copy(i)\n  j =")
    start = START.format(name="body").replace("of_body =", "ROOT of_body =")
    start = start.replace("  s =", "  near = s32[] copy(zero)\n  s =")
    text = f"{loop}ENTRY e {{\n  x = f32[2] parameter(0){start}}}"
    text = text.replace("add(i,", "add(k,").replace("tuple(zero,", "tuple(near,")
    assert runs(text, "negate") == [12]
