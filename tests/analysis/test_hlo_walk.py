# SPDX-License-Identifier: Apache-2.0
import jax
import jax.numpy as jnp
import pytest

from tessera.analysis import hlo
from tessera.analysis.dataflow import Dataflow
from tessera.analysis.hlo_walk import cause, executions

LINE = 'metadata={op_name="%s" source_file="me.py" source_line=%d}'


def runs(text, opcode):
    flow = Dataflow(hlo.parse("HloModule m\n" + text))
    return [
        (each.calls, each.is_conditional)
        for each in flow.nodes
        if each.instruction.opcode == opcode
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
    assert runs(text, "negate") == [(1, False), (12, False)]


def calls_in_loop(function, *arguments):
    text = jax.jit(function).lower(*arguments).compile().as_text()
    nodes = executions(hlo.parse(text))
    return {n.calls for n in nodes if "while" in [o.opcode for _, o in n.path[:-1]]}


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
    assert runs(text, "negate") == [(None, False)]


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
    assert runs(text, "negate") == runs(text, "abs") == [(1, True)]


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
    assert runs(text, "reduce-scatter") == [(1, False)]


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
            f"  ROOT z = f32[4] while(x), body=body, {trips(2)}, " + LINE % ("loop", 3),
            "}",
        )
        == "loop"
    )
