# SPDX-License-Identifier: Apache-2.0
"""What a collective is, whichever of its forms a compiler writes."""

import pytest

from tessera.analysis.collective_operands import arrays_of, groups_of, kind_of
from tessera.analysis.hlo import parse

PAIRS = "source_target_pairs={{0,1},{1,0}}"
SENT = 'frontend_attributes={_xla_send_recv_source_target_pairs="{{0,1},{1,0}}"}'
GROUPS = "replica_groups=[2,2]<=[4]"


def entry_of(line):
    text = (
        "HloModule m\nENTRY e {\n  x = f32[8] parameter(0)\n  t = token[] after-all()\n"
    )
    module = parse(f"{text}  ROOT r = {line}\n}}")
    return module.computations["e"]


@pytest.mark.parametrize(
    ("line", "kind", "groups", "arrays"),
    [
        (f"f32[8] all-reduce(x), {GROUPS}", "all-reduce", ((0, 1), (2, 3)), ["f32[8]"]),
        (
            f"(f32[8], f32[16]) all-gather-start(x), {GROUPS}",
            "all-gather",
            ((0, 1), (2, 3)),
            ["f32[16]"],
        ),
        (
            f"f32[8] collective-permute(x), {PAIRS}",
            "collective-permute",
            ((0, 1), (1, 0)),
            ["f32[8]"],
        ),
        (
            f"(f32[8], u32[], token[]) send(x, t), {SENT}",
            "collective-permute",
            ((0, 1), (1, 0)),
            ["f32[8]"],
        ),
        # One array in two pieces.
        (
            "(f32[8], f32[8]) all-to-all(x, x), replica_groups={{0,1}}",
            "all-to-all",
            ((0, 1),),
            ["f32[2,8]"],
        ),
    ],
)
def test_every_form_of_a_collective_is_read(line, kind, groups, arrays):
    entry = entry_of(line)
    assert kind_of(entry.root) == kind
    assert groups_of(entry.root, 4) == groups
    assert [str(array) for array in arrays_of(entry, entry.root)] == arrays


@pytest.mark.parametrize(
    "line",
    [
        "f32[8] negate(x)",
        "(f32[8], u32[], token[]) send(x, t)",
        "f32[8] all-reduce-done(x)",
    ],
)
def test_anything_else_is_none(line):
    assert kind_of(entry_of(line).root) == ""
