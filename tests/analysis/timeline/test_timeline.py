# SPDX-License-Identifier: Apache-2.0
"""A timeline as text."""

import pytest

from tessera.analysis.timeline.timeline import Communication, Operation, Timeline

OPERATIONS = (
    Operation("dot.1", "jit(f)/dot", "/a/b.py:3", "matmul", (), "compute", 0.5, 4),
    Operation(
        "gather.1",
        "",
        "",
        "all-gather",
        ("dp", "tp"),
        "NVLink",
        0.5,
        4,
        1.0,
        "links busy",
    ),
)


def report(**changes):
    values = {
        "target": "h100:1x8",
        "rule": "a roofline",
        "seconds": 4.0,
        "computation": {"matmul": 2.0, "other": 0.0},
        "communication": {("dp", "tp"): Communication(2.0, 1.0, 1.0)},
        "conditional": 0.0,
        "unknown_loops": 0,
        "unknown_collectives": 0,
        "operations": OPERATIONS,
    }
    return Timeline(**{**values, **changes})


def test_the_parts_of_a_step_add_up_to_its_time():
    found = report()
    assert (found.compute, found.exposed, found.overlapped, found.idle) == (2, 1, 1, 1)
    assert found.compute + found.exposed + found.idle == found.seconds
    assert found.overlap == 0.5


def test_the_text_has_the_costliest_operations_and_the_totals():
    assert report().as_text() == (
        "timeline of one step on a device of h100:1x8, predicted: a roofline\n"
        "operation  kind        stream   times       each   total  of the step  "
        "waited for  line    op\n"
        "dot.1      matmul      compute      4  500.00 ms  2.00 s       50.0 %"
        "              a/b.py:3  jit(f)/dot\n"
        "gather.1   all-gather  NVLink       4  500.00 ms  2.00 s       50.0 %  "
        "    1.00 s  ?\n"
        "\n"
        "predicted step on h100:1x8: 4.00 s\n"
        "  computation            2.00 s (50.0 %): matmul 2.00 s\n"
        "  exposed communication  1.00 s (25.0 %): dp×tp 1.00 s of 2.00 s\n"
        "    1.00 s all-gather dp×tp: links busy\n"
        "  overlapped             1.00 s (50.0 % of all communication)\n"
        "  idle                   1.00 s"
    ).replace("line    op", "line      op")


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"conditional": 1.5}, "1.50 s of the computation is in branches that are"),
        ({"unknown_loops": 2}, "2 loops of unknown length count once"),
        ({"unknown_collectives": 3}, "unknown: 3 collectives, of a kind or in groups"),
    ],
)
def test_what_is_not_known_is_said(changes, note):
    assert note in report(**changes).as_text()
    assert note not in report().as_text()


def test_only_the_costliest_of_many_operations_are_listed():
    operations = [
        Operation(f"op.{n}", "", "", "other", (), "compute", 1.0 + n, 1)
        for n in range(100)
    ]
    text = report(operations=tuple(operations)).as_text()
    assert "op.99 " in text
    assert "op.0 " not in text
    assert "… 80 more operations and transfers of 3240.00 s" in text


def test_an_empty_program_has_a_text():
    found = report(seconds=0.0, computation={}, communication={}, operations=())
    assert "predicted step on h100:1x8: 0.00 µs" in found.as_text()
    assert "  overlapped             0.00 µs\n" in found.as_text()
    assert found.overlap is None


def test_the_longest_waits_come_first_each_with_its_reason():
    operations = [
        Operation(
            f"g.{n}", "f/dot", "", "all-gather", ("dp",), "NVLink", 1.0, 1, n, why
        )
        for n, why in enumerate(("", "synchronous", "links busy", "needed at once"))
    ]
    found = report(operations=tuple(operations))
    assert [each.name for each in found.waits] == ["g.3", "g.2", "g.1"]
    assert (
        "    3.00 s all-gather dp f/dot: needed at once\n"
        "    2.00 s all-gather dp f/dot: links busy\n"
        "    1.00 s all-gather dp f/dot: synchronous\n"
    ) in found.as_text()
