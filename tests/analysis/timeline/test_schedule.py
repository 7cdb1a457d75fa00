# SPDX-License-Identifier: Apache-2.0
"""Programs become steps in the order of their text."""

import pytest

from tessera.analysis.hlo import parse
from tessera.analysis.timeline.schedule import (
    Compute,
    Loop,
    Start,
    TimedSteps,
    Wait,
    serial_seconds,
)
from tessera.mesh import Mesh
from tests.analysis.timeline.round_targets import GPU, TPU

GROUPS = "replica_groups=[1,8]<=[8]"


def steps_of(text, target=GPU):
    mesh = Mesh(["dp"], shape=(8,), target=target)
    module = parse(f"HloModule m, is_scheduled=true\n{text}")
    return TimedSteps(module, mesh, target).steps


def told(steps):
    """Steps in short: what each does, and to what."""
    words = []
    for step in steps:
        match step:
            case Compute(instruction):
                words.append(instruction.name)
            case Start(_, transfer):
                words.append(f"start {transfer.name}")
            case Wait():
                words.append("wait")
            case Loop(instruction, body, count):
                words.append(f"{count} × ({' '.join(told(body))})")
    return words


def test_an_asynchronous_collective_starts_and_is_waited_for():
    steps = steps_of(f"""ENTRY e {{
  x = f32[1000] parameter(0)
  s = (f32[1000], f32[8000]) all-gather-start(x), {GROUPS}, dimensions={{0}}
  y = f32[1000] negate(x)
  d = f32[8000] all-gather-done(s)
  t = (f32[8000], f32[1000]) tuple(d, y)
  ROOT z = f32[8000] copy(d)
}}""")
    assert told(steps) == ["start s", "y", "wait", "z"]


def test_a_synchronous_collective_is_waited_for_at_once():
    steps = steps_of(f"""ENTRY e {{
  x = f32[1000] parameter(0)
  s = f32[1000] all-reduce(x), {GROUPS}
  ROOT y = f32[1000] negate(x)
}}""")
    assert told(steps) == ["start s", "wait", "y"]


def test_a_wrapped_collective_is_found_in_its_computation():
    steps = steps_of(f"""wrapped {{
  p = f32[1000] parameter(0)
  ROOT r = f32[1000] all-to-all(p), {GROUPS}, dimensions={{0}}
}}
ENTRY e {{
  x = f32[1000] parameter(0)
  s = ((f32[1000]), f32[1000]) async-start(x), calls=wrapped
  u = ((f32[1000]), f32[1000]) async-update(s)
  y = f32[1000] negate(x)
  ROOT d = f32[1000] async-done(u)
}}""")
    assert told(steps) == ["start s", "y", "wait"]
    first, *_, last = steps
    assert first.transfer.kind == "all-to-all"
    assert first.key == last.key


def test_a_wrapped_computation_runs_beside_the_main_stream():
    steps = steps_of("""wrapped {
  p = f32[1000] parameter(0)
  ROOT r = f32[1000] negate(p)
}
ENTRY e {
  x = f32[1000] parameter(0)
  s = ((f32[1000]), f32[1000]) async-start(x), calls=wrapped
  ROOT d = f32[1000] async-done(s)
}""")
    first, last = steps
    assert first.transfer.kind == "computation"
    # 8000 bytes at 1e9 bytes/s.
    assert first.transfer.seconds == pytest.approx(8e-6)
    assert first.key == last.key


def test_a_copy_between_memories_is_a_transfer():
    steps = steps_of("""ENTRY e {
  x = f32[1000] parameter(0)
  s = (f32[1000], f32[1000], u32[]) copy-start(x)
  ROOT d = f32[1000] copy-done(s)
}""")
    first, _ = steps
    assert (first.transfer.kind, first.transfer.row) == ("copy", None)
    assert first.transfer.seconds == pytest.approx(4e-6)


def test_a_copy_to_the_host_takes_the_time_of_its_link():
    (first,) = steps_of("""ENTRY e {
  x = f32[6000000] parameter(0)
  ROOT s = (f32[6000000]{0:S(5)}, f32[6000000]{0}, u32[]) copy-start(x)
}""")
    # 24 MB at 24 GB/s.
    assert first.transfer.seconds == pytest.approx(1e-3)


ASYNC = 'backend_config={"async_collective_fusion_config":{"flag_start":"2"}}'


def test_a_tpu_passes_a_collective_through_the_fusions_that_it_overlaps_with():
    gather = f"all-gather(p), channel_id=7, {GROUPS}, dimensions={{0}}, {ASYNC}"
    cycles = 'backend_config={"window_config":{"estimated_cycles":"5000"}}'
    steps = steps_of(
        f"""first {{
  p = f32[1000] parameter(0)
  g = f32[8000] {gather}
  ROOT r = (f32[8000], u32[]) custom-call(g), custom_call_target="AsyncCollectiveStart"
}}
middle {{
  p = f32[1000] parameter(0)
  g = f32[8000] {gather}
  ROOT r = f32[1000] negate(p)
}}
last {{
  p = f32[1000] parameter(0)
  g = f32[8000] {gather}
  ROOT r = f32[8000] custom-call(g), custom_call_target="AsyncCollectiveDone"
}}
ENTRY e {{
  x = f32[1000] parameter(0)
  s = (f32[8000], u32[]) fusion(x), kind=kCustom, calls=first
  m = f32[1000] fusion(x), kind=kOutput, calls=middle, {cycles}
  ROOT d = f32[8000] fusion(x), kind=kCustom, calls=last
}}""",
        TPU,
    )
    assert told(steps) == ["start s", "m", "wait"]
    first, second, third = steps
    assert first.key == third.key
    assert second.seconds == pytest.approx(5e-6)


def test_a_fused_collective_takes_its_own_time_too():
    steps = steps_of(f"""scatter {{
  p = f32[1000] parameter(0)
  i = s32[] parameter(1)
  g = f32[1000] all-reduce(p), {GROUPS}
  ROOT r = f32[125] dynamic-slice(g, i), dynamic_slice_sizes={{125}}
}}
ENTRY e {{
  x = f32[1000] parameter(0)
  i = s32[] parameter(1)
  ROOT r = f32[125] fusion(x, i), kind=kCustom, calls=scatter
}}""")
    assert told(steps) == ["r", "start r", "wait"]
    assert steps[1].transfer.kind == "reduce-scatter"


LOOP = """body {
  p = (s32[], f32[1000]) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  x = f32[1000] get-tuple-element(p), index=1
  y = f32[1000] negate(x)
  one = s32[] constant(1)
  j = s32[] add(i, one)
  ROOT t = (s32[], f32[1000]) tuple(j, y)
}
condition {
  p = (s32[], f32[1000]) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  n = s32[] constant(12)
  ROOT c = pred[] compare(i, n), direction=LT
}
ENTRY e {
  x = f32[1000] parameter(0)
  begin = s32[] BEGIN
  t = (s32[], f32[1000]) tuple(begin, x)
  ROOT w = (s32[], f32[1000]) while(t), condition=condition, body=body CONFIG
}"""


@pytest.mark.parametrize(
    ("begin", "config", "count"),
    [
        ("constant(2)", "", 10),
        ("parameter(1)", "", None),
        (
            "parameter(1)",
            ', backend_config={"known_trip_count":{"n":"5"}}',
            5,
        ),
    ],
)
def test_a_loop_has_the_length_that_the_program_or_its_condition_says(
    begin, config, count
):
    steps = steps_of(LOOP.replace("BEGIN", begin).replace("CONFIG", config))
    assert told(steps) == [f"{count} × (y j)"]


CONDITIONAL = """short {
  p = f32[1000] parameter(0)
  ROOT y = f32[1000] negate(p)
}
long {
  p = f32[1000] parameter(0)
  y = f32[1000] negate(p)
  ROOT z = f32[1000] negate(y)
}
ENTRY e {
  x = f32[1000] parameter(0)
  n = s32[] NUMBER
  ROOT c = f32[1000] conditional(n, x, x), branch_computations={short, long}
}"""


@pytest.mark.parametrize(
    ("scope", "is_known"),
    [("tessera_taken_3_of_4", True), ("tessera_taken_at_most_3_of_4", False)],
)
def test_a_branch_says_in_its_name_scope_how_often_it_is_taken(scope, is_known):
    name = f'metadata={{op_name="jit(f)/cond/branch_1_fun/{scope}/cos"}}'
    text = CONDITIONAL.replace("negate(y)", f"negate(y), {name}")
    text = text.replace("long}", 'long}, metadata={op_name="jit(f)/cond"}')
    (found,) = steps_of(text.replace("NUMBER", "parameter(1)"))
    assert found.is_known == is_known
    assert [(share, told(body)) for share, body in found.parts] == [
        (0.25, ["y"]),
        (0.75, ["y", "z"]),
    ]


def test_the_name_scope_of_an_inner_branch_says_nothing_of_the_outer_one():
    name = "jit(f)/cond/branch_1_fun/cond/branch_1_fun/tessera_taken_1_of_4/cos"
    text = CONDITIONAL.replace("negate(y)", f'negate(y), metadata={{op_name="{name}"}}')
    text = text.replace("long}", 'long}, metadata={op_name="jit(f)/cond"}')
    (found,) = steps_of(text.replace("NUMBER", "parameter(1)"))
    assert not found.is_known


def test_of_branches_that_data_choose_the_longest_is_taken():
    (found,) = steps_of(CONDITIONAL.replace("NUMBER", "parameter(1)"))
    assert not found.is_known
    ((share, body),) = found.parts
    assert (share, told(body)) == (1.0, ["y", "z"])
    assert serial_seconds([found]) == pytest.approx(16e-6)


def test_a_fallback_is_not_taken_where_data_choose():
    marked = 'ROOT z = f32[1000] negate(y), metadata={op_name="tessera_fallback/neg"}'
    text = CONDITIONAL.replace("ROOT z = f32[1000] negate(y)", marked)
    (found,) = steps_of(text.replace("NUMBER", "parameter(1)"))
    ((share, body),) = found.parts
    assert (found.is_known, share, told(body)) == (False, 1.0, ["y"])
