# SPDX-License-Identifier: Apache-2.0
"""What overlaps and what is waited for, in seconds that were computed by hand."""

import pytest

from tessera.analysis.hlo import Instruction
from tessera.analysis.timeline.schedule import (
    Branch,
    Compute,
    Loop,
    Start,
    Transfer,
    Wait,
)
from tessera.analysis.timeline.simulation import Simulation


def named(name):
    return Instruction(name, "op", "f32[]", (), "")


def compute(seconds, name="c"):
    return Compute(named(name), "other", seconds)


def start(name, seconds, *links):
    where = frozenset(links or ("NVLink",))
    transfer = Transfer(named(name), "all-gather", seconds, where)
    return Start(name, transfer)


def loop(count, *body):
    return Loop(named("while"), body, count)


def run(*steps):
    found = Simulation(steps)
    totals = found.totals
    return found, found.now, sum(totals.compute.values()), dict(totals.waited)


def test_computation_hides_a_transfer_that_is_shorter():
    _, seconds, spent, waited = run(start("g", 2.0), compute(3.0), Wait("g"))
    assert (seconds, spent, waited) == (3.0, 3.0, {})


def test_a_longer_transfer_is_waited_for():
    _, seconds, spent, waited = run(start("g", 5.0), compute(3.0), Wait("g"))
    assert (seconds, spent, waited) == (5.0, 3.0, {"g": 2.0})


def test_a_transfer_that_nothing_overlaps_blocks():
    _, seconds, _, waited = run(start("g", 2.0), Wait("g"), compute(3.0))
    assert (seconds, waited) == (5.0, {"g": 2.0})


def test_transfers_on_one_link_wait_for_each_other():
    steps = [start("g", 2.0), start("h", 2.0), compute(3.0), Wait("g"), Wait("h")]
    _, seconds, _, waited = run(*steps)
    assert (seconds, waited) == (4.0, {"h": 1.0})


def test_transfers_on_different_links_do_not():
    steps = [
        *(start("g", 2.0, "NVLink"), start("h", 2.0, "InfiniBand")),
        *(compute(3.0), Wait("g"), Wait("h")),
    ]
    _, seconds, _, waited = run(*steps)
    assert (seconds, waited) == (3.0, {})


def test_a_transfer_over_two_levels_waits_for_both():
    steps = [
        *(start("g", 2.0, "NVLink"), start("h", 3.0, "InfiniBand")),
        *(start("i", 1.0, "NVLink", "InfiniBand"), Wait("i")),
    ]
    _, seconds, _, waited = run(*steps)
    assert (seconds, waited) == (4.0, {"i": 4.0})


def test_the_end_of_what_nothing_started_is_no_wait():
    _, seconds, _, waited = run(compute(1.0), Wait("g"))
    assert (seconds, waited) == (1.0, {})


@pytest.mark.parametrize(
    ("steps", "hidden"),
    [
        ((start("g", 2.0), compute(3.0), Wait("g")), 2.0),
        ((start("g", 6.0), compute(3.0), Wait("g")), 3.0),
        ((start("g", 2.0), Wait("g"), compute(3.0)), 0.0),
        # Waiting for another transfer is no computation.
        (
            (
                *(start("g", 5.0), start("h", 3.0, "InfiniBand"), Wait("h")),
                *(compute(1.0), Wait("g")),
            ),
            1.0,
        ),
        # Nor is what was computed before its links were free.
        ((start("h", 2.0), start("g", 2.0), compute(3.0), Wait("g"), Wait("h")), 1.0),
        ((start("g", 2.0), loop(4, compute(0.25)), Wait("g")), 1.0),
        ((loop(7, start("g", 5.0), compute(3.0), Wait("g")),), 21.0),
        # Iterations of 3 s compute for 2; those after the second count on average.
        (
            (
                start("g", 7.5),
                loop(9, compute(2.0), start("h", 1.0, "PCIe"), Wait("h")),
                Wait("g"),
            ),
            pytest.approx(5.0),
        ),
        # Each gather is waited for one iteration later; nothing hides the first.
        (
            (
                start("g", 4.0),
                loop(10, Wait("g"), start("g", 4.0), compute(3.0)),
                Wait("g"),
            ),
            30.0,
        ),
    ],
)
def test_what_is_computed_while_a_transfer_runs_hides_it(steps, hidden):
    found = Simulation(steps)
    assert found.totals.hidden["g"] == hidden


@pytest.mark.parametrize(("count", "times"), [(0, 0), (1, 1), (7, 7), (None, 1)])
def test_a_loop_takes_as_long_as_its_iterations(count, times):
    body = start("g", 5.0), compute(3.0), Wait("g")
    found, seconds, spent, waited = run(loop(count, *body), compute(1.0))
    assert seconds == 5.0 * times + 1.0
    assert spent == 3.0 * times + 1.0
    assert waited == ({"g": 2.0 * times} if times else {})
    assert found.totals.unknown_loops == (count is None)


def test_loops_in_loops_multiply():
    _, seconds, spent, _ = run(loop(3, loop(4, compute(0.5)), compute(1.0)))
    assert (seconds, spent) == (9.0, 9.0)


def test_a_transfer_may_end_in_the_next_iteration():
    # A pipelined gather: each iteration waits for that of the one before.
    body = Wait("g"), start("g", 4.0), compute(3.0)
    _, seconds, spent, waited = run(start("g", 4.0), loop(10, *body), Wait("g"))
    # Of each gather, 3 s are hidden; nothing hides the first.
    assert spent == 30.0
    assert waited == {"g": pytest.approx(4.0 + 9 * 1.0 + 1.0)}
    assert seconds == pytest.approx(44.0)


def test_a_transfer_around_a_loop_overlaps_with_it():
    steps = [start("g", 5.0), loop(6, compute(0.5)), Wait("g")]
    _, seconds, _, waited = run(*steps)
    assert (seconds, waited) == (5.0, {"g": 2.0})


def test_what_a_loop_contains_is_executed_in_each_iteration():
    found, *_ = run(compute(1.0), loop(4, compute(0.5, "a"), compute(1.5, "b")))
    executed = {
        s.work.instruction.name: (s.work.seconds, s.times) for s in found.executed
    }
    assert executed == {"c": (1.0, 1), "a": (0.5, 4), "b": (1.5, 4)}


def branch(*parts, is_known=True):
    return Branch(
        named("if"), tuple((share, (step,)) for share, step in parts), is_known
    )


def test_branches_take_their_share_of_the_time():
    taken = branch((0.25, compute(4.0, "a")), (0.75, compute(1.0, "b")))
    found, seconds, spent, _ = run(loop(8, taken))
    assert seconds == spent == 8 * (0.25 * 4.0 + 0.75 * 1.0)
    assert found.totals.conditional == 0.0
    drawn = {s.work.instruction.name: s for s in found.executed}
    assert (drawn["a"].work.seconds, drawn["a"].times) == (4.0, 2.0)
    assert (drawn["b"].work.seconds, drawn["b"].times) == (1.0, 6.0)


def test_what_data_choose_is_said():
    taken = branch((1.0, compute(4.0)), is_known=False)
    found, seconds, _, _ = run(loop(8, taken), compute(1.0))
    assert seconds == 33.0
    assert found.totals.conditional == 32.0


def test_a_loop_of_very_many_iterations_is_not_executed_one_by_one():
    inner = loop(10**6, start("g", 2.0), compute(1.0), Wait("g"))
    _, seconds, _, waited = run(loop(10**6, inner))
    assert seconds == pytest.approx(2e12)
    assert waited == {"g": pytest.approx(1e12)}


# --- why the device waits


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ([start("g", 2.0), Wait("g", is_synchronous=True)], "synchronous"),
        ([start("g", 2.0), compute(0.1), Wait("g")], "needed at once"),
        ([start("g", 2.0), compute(1.5), Wait("g")], "too little beside it"),
        (
            [start("h", 9.0), start("g", 1.0), compute(8.0), Wait("h"), Wait("g")],
            "links busy",
        ),
        # Waiting for another on other links is no computation beside it.
        (
            [start("h", 9.0, "IB"), start("g", 9.5), Wait("h"), Wait("g")],
            "needed at once",
        ),
        ([start("g", 2.0), compute(2.0), Wait("g")], ""),
    ],
)
def test_the_schedule_says_why_the_device_waits(steps, reason):
    (transfer,) = (s.transfer for s in steps if isinstance(s, Start) and s.key == "g")
    assert Simulation(steps).totals.reason(transfer) == reason


def test_the_reason_is_that_of_most_of_the_time_of_all_iterations():
    wait = [start("g", 2.0), compute(1.5), Wait("g")]
    alone = [start("g", 1.0), Wait("g")]
    found = Simulation([*alone, loop(5, *wait)]).totals
    assert found.reasons == {
        ("g", "needed at once"): 1.0,
        ("g", "too little beside it"): 2.5,
    }
    assert found.reason(wait[0].transfer) == "too little beside it"


def test_computation_of_iterations_that_are_skipped_stands_beside_a_transfer():
    early = start("g", 9.0)
    found = Simulation([early, loop(8, compute(1.0)), Wait("g")]).totals
    assert (found.waited, found.reason(early.transfer)) == (
        {"g": 1.0},
        "too little beside it",
    )
