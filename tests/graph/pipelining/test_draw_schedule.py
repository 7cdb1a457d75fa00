# SPDX-License-Identifier: Apache-2.0
"""Schedules for eyes: the whole table in text, every op as a box in SVG."""

import re
from itertools import pairwise
from xml.etree import ElementTree as ET

import pytest

from tessera.graph.pipelining import Op, custom, schedule
from tessera.graph.pipelining.named_schedules import NAMES

SVG = "{http://www.w3.org/2000/svg}"


def test_text_has_a_row_per_device_and_a_column_per_tick():
    assert schedule("1f1b", 3, 3).as_text() == (
        "1f1b: 3 stages, 3 microbatches, 7 ticks, idle 40.0 %\n"
        "tick     | 0  | 1  | 2     | 3     | 4     | 5  | 6\n"
        "device 0 | F0 | F1 | F2    |       | B0    | B1 | B2\n"
        "device 1 |    | F0 | F1    | F2 B0 | B1    | B2 |\n"
        "device 2 |    |    | F0 B0 | F1 B1 | F2 B2 |    |"
    )


def test_chunks_are_letters_and_numbers_after_the_letters_end():
    assert "F1c" in schedule("interleaved", 2, 2, 3).as_text()
    assert "F0.26 B0.26" in schedule("interleaved", 1, 1, 27).as_text()


def test_a_split_backward_shows_its_weight_gradients():
    assert re.search(r"W0.*W3", schedule("zero_bubble", 2, 4).as_text())


@pytest.mark.parametrize("name", NAMES)
def test_svg_is_well_formed_and_has_a_numbered_box_per_op(name):
    table = schedule(name, 4, 8)
    picture = ET.fromstring(table.as_svg())
    labels = [text.text for text in picture.iter(f"{SVG}text")]
    centered = './/{*}text[@text-anchor="middle"]'
    boxes = [text.text for text in picture.iterfind(centered)]
    assert labels[0] == table.summary() == picture.findtext(f"{SVG}title")
    assert len(boxes) == len(list(table.placed()))
    assert {f"device {d}" for d in range(4)} <= set(labels)
    assert boxes.count("7" if table.chunks == 1 else "7b") >= 8


def test_boxes_of_one_device_do_not_overlap_and_stay_within_the_picture():
    picture = ET.fromstring(schedule("interleaved", 3, 6, 2).as_svg())
    width = float(picture.get("width", 0))
    rows: dict[str, list[tuple[float, float]]] = {}
    for box in picture.iter(f"{SVG}rect"):
        if box.get("fill-opacity"):
            left = float(box.get("x", 0))
            end = left + float(box.get("width", 0))
            rows.setdefault(box.get("y", ""), []).append((left, end))
    assert len(rows) == 3
    for spans in rows.values():
        spans.sort()
        assert spans[-1][1] <= width
        for (_, end), (start, _) in pairwise(spans):
            assert end <= start + 1e-6


def test_a_name_is_escaped():
    cells = [[[Op("F", 0), Op("B", 0)]]]
    table = custom(cells, microbatches=1, name="<a & b>")
    assert ET.fromstring(table.as_svg()).findtext(f"{SVG}title") == table.summary()


def test_a_notebook_shows_the_picture():
    table = schedule("gpipe", 2, 2)
    assert table._repr_svg_() == table.as_svg()
