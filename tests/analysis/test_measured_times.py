# SPDX-License-Identifier: Apache-2.0
"""What the events of a trace say: made-up events, whose times are known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.analysis import hlo, measured_times
from tessera.analysis.ledger import collectives
from tessera.analysis.measured_times import AxesTime, measure
from tessera.analysis.trace_events import OpEvent
from tessera.mesh import Mesh

TEXT = """HloModule jit_step, num_partitions=4

body {
  p = (s32[], f32[250]) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  a = f32[250] get-tuple-element(p), index=1
  ROOT t = (s32[], f32[250]) tuple(i, a)
}

ENTRY e {
  x = f32[250] parameter(0)
  dot.1 = f32[250] dot(x, x)
  n = s32[] constant(0)
  t = (s32[], f32[250]) tuple(n, x)
  w = (s32[], f32[250]) while(t), condition=body, body=body
  sent = f32[250] all-reduce(dot.1), replica_groups=[2,2]<=[4]
  g.start = (f32[250], f32[500]) all-gather-start(x), replica_groups=[2,2]<=[2,2]T(1,0)
  g.done = f32[500] all-gather-done(g.start)
  ROOT r = f32[250] add(sent, g.done)
}
"""
MODULE = hlo.parse(TEXT)


@pytest.fixture
def ledger():
    return collectives(TEXT, Mesh(["dp", "tp"], devices=range(4)))


def events(*spans, device=0):
    return [OpEvent(op, device, start, end) for op, start, end in spans]


def measure_one(ledger, found, executions=1, seconds=10.0):
    return measure(found, MODULE, ledger, executions=executions, seconds=seconds)


def test_communication_time_is_divided_by_axes(ledger):
    found = measure_one(
        ledger, events(("dot.1", 0, 4), ("sent", 4, 6), ("g.start", 6, 7), ("r", 7, 8))
    )
    assert found.compute == 5
    assert found.communication == {
        ("tp",): AxesTime(seconds=2, hidden=0, calls=1),
        ("dp",): AxesTime(seconds=1, hidden=0, calls=1),
    }
    assert (found.communicating, found.hidden, found.overlap) == (3, 0, 0)
    assert found.idle == 2


def test_communication_beside_computation_is_hidden(ledger):
    found = measure_one(ledger, events(("dot.1", 0, 4), ("sent", 3, 7), ("r", 6, 8)))
    assert found.communication["tp",] == AxesTime(seconds=4, hidden=2, calls=1)
    assert found.overlap == 0.5
    assert found.idle == 2


def test_start_and_done_of_an_asynchronous_collective_are_one_call(ledger):
    spans = ("g.start", 0, 1), ("g.done", 1, 3)
    found = measure_one(ledger, events(*spans))
    assert found.communication["dp",] == AxesTime(seconds=3, hidden=0, calls=1)
    assert found.compute == 0


def test_control_flow_and_other_programs_do_not_count(ledger):
    found = measure_one(ledger, events(("w", 0, 9), ("dot.1", 1, 2), ("other", 0, 9)))
    assert found.compute == 1


def test_the_figures_are_means_over_devices_and_executions(ledger):
    first = events(("dot.1", 0, 4), ("dot.1", 10, 14), ("sent", 14, 15))
    second = events(("dot.1", 0, 2), ("dot.1", 10, 12), ("sent", 12, 15), device=1)
    found = measure_one(ledger, first + second, executions=2)
    assert found.compute == (8 + 4) / 4
    assert found.communication["tp",] == AxesTime(seconds=1, hidden=0, calls=0.5)


def test_without_an_event_of_the_program_nothing_is_measured(ledger):
    assert measure_one(ledger, []) is None
    assert measure_one(ledger, events(("other", 0, 1))) is None


SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=8)


@given(SPANS, SPANS)
def test_spans_are_measured_as_sets_of_seconds(first, second):
    def seconds(pairs):
        return {s for start, length in pairs for s in range(start, start + length)}

    def ran(pairs):
        return [OpEvent("", 0, start, start + length) for start, length in pairs]

    assert measured_times._length(ran(first)) == len(seconds(first))
    common = measured_times._overlap(ran(first), ran(second))
    assert common == len(seconds(first) & seconds(second))
