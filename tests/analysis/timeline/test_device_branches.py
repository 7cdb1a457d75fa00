# SPDX-License-Identifier: Apache-2.0
"""Branches that devices take by their place: who waits for whom decides."""

import pytest

from tessera.analysis.hlo import parse
from tessera.analysis.timeline.schedule import Branch, Schedule
from tessera.mesh import Mesh
from tests.analysis.timeline.round_targets import GPU

# Stage s of two computes in the ticks s to s + 3 of five; the mesh is pp 2 x fsdp 2.
PIPELINE = """HloModule m, is_scheduled=true, num_partitions=4
work {
  p = f32[1000] parameter(0)
  ROOT y = f32[1000] negate(p)
}
rest {
  ROOT p = f32[1000] parameter(0)
}
body {
  p = (s32[], f32[1000]) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  x = f32[1000] get-tuple-element(p), index=1
  device = u32[] partition-id()
  one = u32[] constant(1)
  stage = u32[] shift-right-logical(device, one)
  s = s32[] convert(stage)
  tick = s32[] subtract(i, s)
  zero = s32[] constant(0)
  four = s32[] constant(4)
  begun = pred[] compare(tick, zero), direction=GE
  open = pred[] compare(tick, four), direction=LT
  works = pred[] and(begun, open)
  y = f32[1000] conditional(works, x, x), true_computation=work, false_computation=rest
  z = f32[1000] COLLECTIVE
  step = s32[] constant(1)
  j = s32[] add(i, step)
  ROOT t = (s32[], f32[1000]) tuple(j, z)
}
condition {
  p = (s32[], f32[1000]) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  n = s32[] constant(5)
  ROOT c = pred[] compare(i, n), direction=LT
}
ENTRY e {
  x = f32[1000] parameter(0)
  b = s32[] BEGIN
  t = (s32[], f32[1000]) tuple(b, x)
  ROOT w = (s32[], f32[1000]) while(t), condition=condition, body=body, COUNT
}"""
COUNT = 'backend_config={"known_trip_count":{"n":"5"}}'
ACROSS = "collective-permute(y), source_target_pairs={{0,2},{2,0},{1,3},{3,1}}"
INSIDE = "all-reduce(y), replica_groups=[2,2]<=[4]"


def branch_of(collective, begin="constant(0)"):
    text = PIPELINE.replace("COLLECTIVE", collective).replace("BEGIN", begin)
    mesh = Mesh(["pp", "fsdp"], shape=(2, 2), target=GPU)
    module = parse(text.replace("COUNT", COUNT))
    (loop,) = Schedule(module, mesh, GPU).steps
    return next(step for step in loop.body if isinstance(step, Branch))


@pytest.mark.parametrize(
    ("collective", "working"),
    [
        # In each of the five ticks one of the stages works, and the other waits for it.
        (ACROSS, 1.0),
        # Stages that do not meet go on alone: each works in four.
        (INSIDE, 0.8),
        ("copy(y)", 0.8),
    ],
    ids=["across stages", "inside a stage", "alone"],
)
def test_devices_that_meet_wait_for_the_one_that_works(collective, working):
    found = branch_of(collective)
    assert found.is_known
    share, steps = found.parts[0]
    assert share == pytest.approx(working)
    assert [step.instruction.name for step in steps] == ["y"]


def test_what_also_depends_on_data_is_not_known():
    assert not branch_of(ACROSS, "parameter(1)").is_known
