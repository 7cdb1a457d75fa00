# SPDX-License-Identifier: Apache-2.0
"""Collectives become transfers with their row, seconds and links."""

import pytest

from tessera.analysis.hlo import parse
from tessera.analysis.timeline.schedule import Start, TimedSteps
from tessera.mesh import Mesh
from tests.analysis.timeline.round_targets import GPU, TPU

GROUPS = "replica_groups=[2,4]<=[8]"


def transfer(line, target=GPU, axes=("dp", "tp"), shape=(2, 4)):
    module = parse(
        f"HloModule m\nENTRY e {{\n  x = f32[1000] parameter(0)\n  {line}\n}}"
    )
    return transfer_in(module, Mesh(axes, shape=shape, target=target))


def transfer_in(module, mesh):
    steps = TimedSteps(module, mesh, mesh.target).steps
    return next((step.transfer for step in steps if isinstance(step, Start)), None)


@pytest.mark.parametrize(
    ("line", "nbytes", "seconds"),
    [
        # At 1e6 bytes/s; groups of four send 3/4 of what they have together.
        (f"ROOT r = f32[1000] all-reduce(x), {GROUPS}", 4000, 2 * 3e-3),
        (f"ROOT r = f32[250] reduce-scatter(x), {GROUPS}", 4000, 3e-3),
        (f"ROOT r = f32[4000] all-gather(x), {GROUPS}", 16_000, 12e-3),
        (
            f"ROOT r = (f32[1000], f32[4000]) all-gather-start(x), {GROUPS}",
            16_000,
            12e-3,
        ),
        (f"ROOT r = f32[1000] all-to-all(x), {GROUPS}", 4000, 3e-3),
        (
            "ROOT r = f32[1000] collective-permute(x), source_target_pairs={{0,1}}",
            4000,
            4e-3,
        ),
    ],
)
def test_a_collective_takes_what_its_bytes_take_on_its_links(line, nbytes, seconds):
    found = transfer(line)
    assert found.row.axes == ("tp",)
    assert found.row.nbytes == nbytes
    assert found.seconds == pytest.approx(seconds)
    assert found.links == {"NVLink"}


@pytest.mark.parametrize(
    "line",
    [
        "ROOT r = f32[1000] negate(x)",
        "ROOT r = f32[1000] all-reduce(x), replica_groups=[8,1]<=[8]",
        "ROOT r = f32[1000] collective-permute(x), source_target_pairs={{0,0}}",
    ],
)
def test_what_sends_nothing_is_no_transfer(line):
    assert transfer(line) is None


def test_groups_are_found_on_the_torus_by_the_order_of_the_mesh():
    # The mesh lies on the plane with tp along one dim: groups of four are lines.
    line = "ROOT r = f32[4000] all-gather(x), replica_groups=[4,4]<=[16]"
    found = transfer(line, TPU, ("dp", "tp"), (4, 4))
    assert found.row.axes == ("tp",)
    # A line has half of the bandwidth of a ring.
    assert found.seconds == pytest.approx(2 * 12e-3)
    other = transfer(line.replace("<=[16]", "<=[4,4]T(1,0)"), TPU, shape=(4, 4))
    assert other.row.axes == ("dp",)
    assert found.links.isdisjoint(other.links)


def test_a_sum_of_which_a_tpu_keeps_a_slice_is_a_reduce_scatter():
    text = f"""HloModule m
scatter {{
  x = f32[1000] parameter(0)
  i = s32[] parameter(1)
  s = f32[1000] all-reduce(x), {GROUPS}
  ROOT d = f32[250] dynamic-slice(s, i), dynamic_slice_sizes={{250}}
}}
ENTRY e {{
  x = f32[1000] parameter(0)
  i = s32[] parameter(1)
  ROOT r = f32[250] fusion(x, i), kind=kCustom, calls=scatter
}}"""
    found = transfer_in(parse(text), Mesh(("dp", "tp"), shape=(2, 4), target=GPU))
    assert (found.name, found.kind) == ("r", "reduce-scatter")
    assert found.seconds == pytest.approx(3e-3)
