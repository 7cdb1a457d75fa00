# SPDX-License-Identifier: Apache-2.0
"""Pictures of a timeline: SVG, and a trace for Perfetto."""

import json
from xml.etree import ElementTree

import pytest

from tessera.analysis.timeline.drawing import perfetto, svg
from tessera.analysis.timeline.event import Event

OUTER = Event("while.1", "", "", "loop", (), "compute", 1.0, 8.0, 2.0, 4)
INNER = Event("while.2", "", "", "loop", (), "compute", 1.0, 4.0, 0.5, 8)
DOT = Event(
    "dot<1>", "jit(f)/a&b", "me.py:3", "matmul", (), "compute", 1.0, 4.0, 0.5, 8
)
GATHER = Event(
    *("gather", "", "", "all-gather", ("dp",), "NVLink", 5.0, 4.0, 1.0, 4), exposed=2.0
)
EVENTS = [OUTER, INNER, DOT, GATHER]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def picture():
    return ElementTree.fromstring(svg(EVENTS, 10.0, ["a <title>"]))


def boxes(picture):
    """Every box that has a description: its first line, where it is, its color."""
    found = {}
    for box in picture.iter(f"{SVG}rect"):
        if (title := box.find(f"{SVG}title")) is not None:
            name = title.text.split(":")[0].split("\n")[0]
            found[name] = {key: box.get(key) for key in ("x", "y", "width", "fill")}
    return found


def test_widths_are_shares_of_the_step(picture):
    found = boxes(picture)
    whole = float(found["waiting"]["width"])
    assert float(found["dot<1>"]["width"]) == pytest.approx(0.4 * whole)
    left = float(found["waiting"]["x"])
    assert float(found["gather"]["x"]) == pytest.approx(left + 0.5 * whole)


def test_streams_and_levels_of_loops_have_rows_of_their_own(picture):
    rows = {name: float(box["y"]) for name, box in boxes(picture).items()}
    assert rows["while.1"] < rows["while.2"] < rows["dot<1>"] < rows["gather"]
    assert rows["dot<1>"] == rows["waiting"]


def test_a_picture_says_what_it_is_and_loads_nothing(picture):
    text = "".join(picture.itertext())
    assert "a <title>" in text
    assert "jit(f)/a&b" in text
    assert "waited for 2.00 s" in text
    source = svg(EVENTS, 10.0, [])
    assert "href" not in source
    assert "<script" not in source


def test_what_is_too_thin_to_see_is_left_out():
    thin = Event("thin", "", "", "other", (), "compute", 0.0, 1e-6, 1e-6, 1)
    assert "thin" not in svg([DOT, thin], 10.0, [])


def test_a_trace_has_a_track_for_each_stream():
    trace = json.loads(json.dumps(perfetto(EVENTS, "title")))
    names = {
        entry["tid"]: entry["args"]["name"]
        for entry in trace["traceEvents"]
        if entry["name"] == "thread_name"
    }
    assert names == {0: "compute", 1: "NVLink"}


def test_a_trace_has_microseconds_and_says_what_one_execution_takes():
    trace = perfetto(EVENTS, "title")
    by_name = {entry["name"]: entry for entry in trace["traceEvents"]}
    dot = by_name["dot<1>"]
    assert (dot["ph"], dot["ts"], dot["dur"], dot["tid"]) == ("X", 1e6, 4e6, 0)
    assert dot["args"]["seconds each"] == 0.5
    assert dot["args"]["times"] == 8
    assert by_name["gather"]["args"]["seconds waited for"] == 2.0


def test_in_a_trace_what_is_in_a_loop_ends_with_it():
    entries = {e["name"]: e for e in perfetto(EVENTS, "")["traceEvents"]}
    outer, inner = entries["while.1 × 4"], entries["while.2 × 8"]
    assert outer["ts"] <= inner["ts"]
    assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
