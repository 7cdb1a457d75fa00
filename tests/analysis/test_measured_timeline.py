# SPDX-License-Identifier: Apache-2.0
"""The last execution of a device is drawn, with what its loops ran, and no other."""

import pytest

from tessera.analysis import hlo
from tessera.analysis.ledger import collectives
from tessera.analysis.measured_timeline import measured_timeline
from tessera.analysis.trace_events import OpEvent
from tessera.mesh import Mesh
from tests.analysis.test_measured_times import MODULE, TEXT

# Operation, start and end in seconds, of one execution.
STEP = (
    ("dot.1", 0.0, 1.0),
    ("sent", 1.0, 1.5),
    ("g.start", 1.25, 1.75),
    ("r", 2.0, 3.0),
)
LOOPED = """HloModule jit_step

body {
  ROOT turn = f32[4] add(p, p)
}

ENTRY e {
  x = f32[4] parameter(0)
  first = f32[4] add(x, x)
  w = f32[4] while(first), condition=body, body=body
  ROOT r = f32[4] add(w, w)
}
"""


@pytest.fixture
def ledger():
    return collectives(TEXT, Mesh(["dp", "tp"], devices=range(4)))


def steps(number, *, each=STEP, device=0, length=10.0):
    return [
        OpEvent(op, device, start + step * length, end + step * length)
        for step in range(number)
        for op, start, end in each
    ]


def drawn(trace):
    """Lane, name, begin and length of each event, in seconds."""
    events = trace["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    return [
        (lanes[e["tid"]], e["name"], e["ts"] / 1e6, e["dur"] / 1e6)
        for e in events
        if e["ph"] == "X"
    ]


def test_it_is_the_last_execution_from_its_first_operation_on(ledger):
    trace = measured_timeline(steps(3), MODULE, ledger, 3)
    assert drawn(trace) == [
        ("computation", "dot.1", 0.0, 1.0),
        ("sent over tp", "sent", 1.0, 0.5),
        ("sent over dp", "g.start", 1.25, 0.5),
        ("computation", "r", 2.0, 1.0),
    ]


def test_one_execution_is_drawn_whole_and_of_the_first_device(ledger):
    found = [*steps(1, device=3), *steps(1, device=1)]
    assert len(drawn(measured_timeline(found, MODULE, ledger, 1))) == len(STEP)


def test_what_a_loop_runs_belongs_to_its_execution():
    module, mesh = hlo.parse(LOOPED), Mesh(["dp"], devices=range(1))
    turns = tuple(("turn", at, at + 0.5) for at in (1.0, 2.0))
    each = (("first", 0.0, 1.0), *turns, ("r", 3.0, 4.0))
    trace = measured_timeline(
        steps(2, each=each), module, collectives(LOOPED, mesh), executions=2
    )
    assert [name for _, name, *_ in drawn(trace)] == ["first", "turn", "turn", "r"]


def test_a_branch_that_runs_as_often_as_the_program_does_not_divide_it():
    """Twice in the first execution and never in the second."""
    module, mesh = hlo.parse(LOOPED), Mesh(["dp"], devices=range(1))
    each = (("first", 0.0, 1.0), ("r", 3.0, 4.0))
    turns = [OpEvent("turn", 0, at, at + 0.5) for at in (1.0, 2.0)]
    found = [*steps(2, each=each), *turns]
    trace = measured_timeline(found, module, collectives(LOOPED, mesh), executions=2)
    assert [name for _, name, *_ in drawn(trace)] == ["first", "r"]


@pytest.mark.parametrize("at", [-2.0, 5.0], ids=["begins", "ends"])
def test_where_a_program_begins_or_ends_with_a_loop_nothing_is_guessed(at):
    module, mesh = hlo.parse(LOOPED), Mesh(["dp"], devices=range(1))
    each = (("turn", at, at + 1.0), ("first", 0.0, 1.0), ("r", 3.0, 4.0))
    ledger = collectives(LOOPED, mesh)
    assert measured_timeline(steps(2, each=each), module, ledger, 2) is None
    assert len(drawn(measured_timeline(steps(1, each=each), module, ledger, 1))) == 3


def test_events_of_other_programs_draw_nothing(ledger):
    other = [OpEvent("fusion.99", 0, 0.0, 1.0)]
    assert measured_timeline(other, MODULE, ledger, 1) is None
    assert measured_timeline([], MODULE, ledger, 1) is None


def test_where_no_operation_runs_once_in_an_execution_nothing_is_drawn(ledger):
    """As where the trace lost events."""
    assert measured_timeline(steps(2), MODULE, ledger, 3) is None
