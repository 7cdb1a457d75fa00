# SPDX-License-Identifier: Apache-2.0
"""What the events of a trace say: made-up events, whose times are known."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.analysis import hlo, measured_times
from tessera.analysis.cost import Balance
from tessera.analysis.ledger import collectives
from tessera.analysis.measured_rates import as_json, as_text
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


# --- rates


TABLE = """\
measured on NVIDIA H200, per device and execution: mean of 1 executions of 8.00 ms
part                                    amount  calls     time  of the step  hidden  \
           rate  of peak
computation            2.00 T FLOPs in matmuls         4.00 ms         50 %          \
500.00 T FLOP/s     51 %
communication over tp                   1000 B      1  2.00 ms         25 %    50 %  \
      488 KiB/s      0 %
communication over dp                 1.95 KiB      1  1.00 ms         12 %     0 %  \
      977 KiB/s      0 %
idle                                                   2.00 ms         25 %
33 % of communication ran while the device computed
a collective's time includes waiting for the other devices
over the whole step 250.00 T FLOP/s in matmuls, 25 % of the peak"""


def balance(device_kind, compute):
    return Balance(
        device_kind=device_kind,
        flops=2e12,
        memory_bytes=0,
        communicated={("tp",): 1000, ("dp",): 2000},
        compute=compute,
        memory=None,
        communication=None,
    )


@pytest.fixture
def found(ledger):
    spans = ("dot.1", 0, 4e-3), ("sent", 3e-3, 5e-3), ("g.start", 6e-3, 7e-3)
    return measure_one(ledger, events(*spans), seconds=8e-3)


def test_the_table_has_rates_and_their_share_of_the_peak(ledger, found):
    text = as_text(found, balance("NVIDIA H200", 2e12 / 989.4e12), ledger)
    assert text == TABLE


def test_a_device_of_unknown_peaks_has_no_shares(ledger, found):
    text = as_text(found, balance("some device", None), ledger)
    assert "the peaks of this device are not known" in text
    data = json.loads(json.dumps(as_json(found, balance("some device", None), ledger)))
    assert data["matmul_share_of_peak"] is None
    (over_tp, over_dp) = data["communication"]
    # All but one part of two: of what is reduced twice.
    assert over_tp["bytes_per_second"] == pytest.approx(2 * 1000 / 2 / 2e-3)
    assert over_dp["bytes_per_second"] == pytest.approx(2000 / 2 / 1e-3)
    assert over_tp["share_of_peak"] is None
