# SPDX-License-Identifier: Apache-2.0
"""Events of a timeline, as a trace for Perfetto."""

import json

from tessera.analysis.timeline.event import Event, perfetto

OUTER = Event("while.1", "", "", "loop", (), "compute", 1.0, 8.0, 2.0, 4)
INNER = Event("while.2", "", "", "loop", (), "compute", 1.0, 4.0, 0.5, 8)
DOT = Event(
    "dot<1>", "jit(f)/a&b", "me.py:3", "matmul", (), "compute", 1.0, 4.0, 0.5, 8
)
GATHER = Event(
    *("gather", "", "", "all-gather", ("dp",), "NVLink", 5.0, 4.0, 1.0, 4), exposed=2.0
)
EVENTS = [OUTER, INNER, DOT, GATHER]


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
