# SPDX-License-Identifier: Apache-2.0
"""The named schedules: idle time as in the literature, memory without M in it."""

import sys
from collections.abc import Callable

import pytest

from tessera.errors import PipelineSizeError, ScheduleError, UnknownScheduleError
from tessera.graph.pipelining import Op, custom, schedule
from tessera.graph.pipelining.buffer_slots import allocate
from tessera.graph.pipelining.named_schedules import (
    NAMES,
    dualpipev,
    gpipe,
    interleaved,
    one_f_one_b,
    zero_bubble,
)
from tessera.graph.pipelining.schedule_legality import check
from tests.graph.pipelines import cases

STAGES = range(1, 8)
MICROBATCHES = (1, 2, 3, 4, 5, 7, 8, 13, 16, 24)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero_bubble"])
@pytest.mark.parametrize("stages", STAGES)
def test_every_schedule_is_legal_for_any_sizes(name, stages):
    for microbatches in MICROBATCHES:
        check(schedule(name, stages, microbatches))


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", STAGES)
def test_the_counted_idle_share_of_gpipe_and_1f1b_is_the_formulas(name, stages):
    for m in MICROBATCHES:
        table = schedule(name, stages, m)
        assert table.idle_fraction() == pytest.approx((stages - 1) / (m + stages - 1))


def test_that_share_does_not_depend_on_what_forward_and_backward_cost():
    for table, expected in (
        (gpipe(4, 9), 3 / 12),
        (one_f_one_b(4, 9), 3 / 12),
        (interleaved(4, 8, 3), 3 / 27),
    ):
        for forward, backward in ((1.0, 1.0), (1.0, 3.0), (0.5, 0.1)):
            counted = table.idle_fraction(forward, backward)
            assert counted == pytest.approx(expected)


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("chunks", [1, 2, 3, 5])
def test_interleaved_is_legal_and_waits_a_chunk_instead_of_a_device(stages, chunks):
    for groups in (1, 2, 3, 6):
        m = groups * stages
        table = interleaved(stages, m, chunks)
        check(table)
        expected = (stages - 1) / (chunks * m + stages - 1)
        assert table.idle_fraction() == pytest.approx(expected)


@pytest.mark.parametrize("stages", STAGES)
def test_zero_bubble_waits_as_1f1b_does_but_for_no_weight_gradient(stages):
    for m in MICROBATCHES:
        table = zero_bubble(stages, m)
        assert table.ticks == one_f_one_b(stages, m).ticks
        expected = 2 * (stages - 1) / (3 * m + 2 * (stages - 1))
        assert table.idle_fraction() == pytest.approx(expected)
        for f, b, w in ((1, 1, 1), (1, 2, 1), (1, 2, 2), (3, 1, 5)):
            bubble = (stages - 1) * (f + b)
            expected = bubble / (m * (f + b + w) + bubble)
            assert table.idle_fraction(f, b, w) == pytest.approx(expected)


def test_zero_bubble_waits_less_than_1f1b_where_the_backward_runs_the_forward_again():
    split = schedule("zero_bubble", 8, 64).idle_fraction(1, 2, 1)
    assert split < one_f_one_b(8, 64).idle_fraction(1, 3)


@pytest.mark.parametrize("stages", STAGES)
def test_dualpipev_waits_as_deepseek_says_where_all_work_takes_equally_long(stages):
    for m in (2 * stages, 2 * stages + 1, 3 * stages, 8 * stages):
        table = dualpipev(stages, m)
        check(table)
        # (PP/2 - 1)(F&B + B - 3W) with PP = 2S: of chunks, two of which are a device.
        bubble = (stages - 1) * (3 + 2 - 3) / 2
        expected = bubble / (3 * m + bubble)
        assert table.idle_fraction() == pytest.approx(expected)
        assert table.ticks < 6 * m + 2 * (stages - 1)  # fewer than units of time


def test_dualpipev_keeps_two_chunks_for_each_device_and_one():
    for stages in (2, 4, 8):
        for m in (2 * stages, 4 * stages, 16 * stages):
            slots = allocate(dualpipev(stages, m))
            # One more is free to be written.
            assert slots.residual_slots == 2 * stages + 2
            assert slots.weight_slots == stages + 1
            assert (slots.input_slots, slots.cotangent_slots) == (2, 2)


def test_dualpipev_needs_two_microbatches_for_each_stage():
    with pytest.raises(PipelineSizeError) as caught:
        schedule("dualpipev", 4, 7)
    assert str(caught.value).splitlines()[:3] == [
        "[T311] the schedule 'dualpipev' needs two microbatches for each stage",
        "  got: 7 microbatches, 4 stages",
        "  fix: use 8 microbatches or more, or another schedule",
    ]
    with pytest.raises(PipelineSizeError, match="has two chunks of layers per device"):
        schedule("dualpipev", 2, 4, chunks=3)
    assert schedule("dualpipev", 2, 4, chunks=2) == dualpipev(2, 4)


@pytest.mark.parametrize(
    ("name", "stages", "rings"),
    [
        ("1f1b", 4, (5, 1, 0)),
        ("interleaved", 4, (9, 1, 0)),  # two chunks
        ("zero_bubble", 4, (5, 1, 4)),
        ("1f1b", 8, (13, 1, 0)),
    ],
)
def test_what_a_device_keeps_does_not_depend_on_the_number_of_microbatches(
    name, stages, rings
):
    for m in (4 * stages, 8 * stages, 32 * stages):
        slots = allocate(schedule(name, stages, m), recomputes=True)
        assert (
            slots.input_slots,
            slots.cotangent_slots,
            slots.weight_slots,
        ) == rings


def test_gpipe_keeps_every_microbatch():
    for m in (4, 8, 32):
        # One is free to be written while all others wait.
        assert allocate(gpipe(4, m)).residual_slots == m + 1
        assert allocate(gpipe(4, m), recomputes=True).input_slots == m


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_1f1b_keeps_residuals_from_a_forward_until_its_gradient_has_come_back(stages):
    slots = allocate(one_f_one_b(stages, 5 * stages))
    assert (slots.input_slots, slots.residual_slots) == (1, 2 * stages - 1)


def test_zero_bubble_keeps_at_most_a_third_more_microbatches_than_there_are_stages():
    for stages in (2, 4, 8, 16):
        slots = allocate(zero_bubble(stages, 5 * stages), recomputes=True)
        assert slots.weight_slots <= stages + (stages + 1) // 3
        assert slots.input_slots <= 2 * (stages - 1) + 1


@pytest.mark.parametrize("name", cases(NAMES, "1f1b"))
def test_a_schedule_may_be_of_seventy_two_devices(name):
    table = schedule(name, 72, 504)
    assert allocate(table).residual_slots <= 504 + 1
    assert table.table("F").shape == (table.ticks, 72, 2)


@pytest.mark.parametrize("name", NAMES)
def test_the_work_to_make_a_schedule_grows_as_its_operations_do(name):
    small = num_lines_run(lambda: allocate(schedule(name, 6, 42)))
    large = num_lines_run(lambda: allocate(schedule(name, 24, 168)))
    assert large <= 16 * small


def num_lines_run(function: Callable[[], object]) -> int:
    """How many lines of Python a function runs: its work, on however busy a machine."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def test_a_schedule_is_found_by_its_name():
    assert schedule("gpipe", 2, 4) == gpipe(2, 4)
    assert schedule("1f1b", 2, 4) == one_f_one_b(2, 4)
    assert schedule("zero_bubble", 2, 4) == zero_bubble(2, 4)
    assert schedule("interleaved", 2, 4) == interleaved(2, 4, chunks=2)
    assert schedule("interleaved", 2, 4, chunks=3) == interleaved(2, 4, chunks=3)


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(UnknownScheduleError) as caught:
        schedule("zerobubble", 2, 4)
    assert str(caught.value) == (
        "[T310] there is no pipeline schedule 'zerobubble'\n"
        "  fix: did you mean 'zero_bubble'? Known: 'gpipe', '1f1b', 'interleaved', "
        "'zero_bubble', 'dualpipev'\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T310.html"
    )


def test_interleaved_names_the_nearest_numbers_of_microbatches():
    with pytest.raises(PipelineSizeError) as caught:
        interleaved(4, 10, chunks=2)
    assert str(caught.value) == (
        "[T311] interleaved chunks need a multiple of the stages as microbatches\n"
        "  got: 10 microbatches, 4 stages: 10 % 4 = 2\n"
        "  fix: use 8 or 12 microbatches, or the schedule '1f1b'\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T311.html"
    )
    with pytest.raises(PipelineSizeError, match="fix: use 4 microbatches, or"):
        interleaved(4, 3, chunks=2)


def test_chunks_belong_to_interleaved_alone():
    with pytest.raises(PipelineSizeError) as caught:
        schedule("gpipe", 4, 8, chunks=2)
    assert str(caught.value) == (
        "[T311] the schedule 'gpipe' has one chunk of layers per device\n"
        "  got: chunks=2\n"
        "  fix: leave chunks out, or use the schedule 'interleaved'\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T311.html"
    )


@pytest.mark.parametrize("wrong", [0, -1, 2.0, True, "4"])
def test_sizes_are_positive_whole_numbers(wrong):
    for make in (gpipe, one_f_one_b, zero_bubble):
        with pytest.raises(PipelineSizeError, match="positive whole number"):
            make(2, wrong)
        with pytest.raises(PipelineSizeError, match="positive whole number"):
            make(wrong, 2)
    with pytest.raises(PipelineSizeError) as caught:
        interleaved(2, 4, chunks=wrong)
    assert str(caught.value) == (
        "[T311] a pipeline's number of chunks is a positive whole number\n"
        f"  got: chunks={wrong!r}\n"
        "  fix: use chunks=1 or more\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T311.html"
    )


def test_a_table_of_ones_own_is_taken_if_it_is_legal():
    made = zero_bubble(3, 5)
    own = custom(
        [[list(cell) for cell in row] for row in made.cells],
        microbatches=5,
        splits_backward=True,
        name="mine",
    )
    assert own.cells == made.cells
    assert own.stages == 3
    assert own.idle_fraction() == made.idle_fraction()


def test_a_table_of_ones_own_has_a_name_of_its_own():
    cells = one_f_one_b(2, 2).cells
    with pytest.raises(ScheduleError) as caught:
        custom(cells, microbatches=2, name="gpipe")
    assert str(caught.value) == (
        "[T309] the name 'gpipe' belongs to another pipeline schedule\n"
        "  fix: give your table a name of its own\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T309.html"
    )


def test_an_empty_table_has_no_stages():
    with pytest.raises(PipelineSizeError, match="number of stages"):
        custom([], microbatches=1)


def test_a_table_of_ones_own_is_refused_if_it_is_not_legal():
    with pytest.raises(ScheduleError, match="B0 of device 0 is missing"):
        custom([[[Op("F", 0)]]], microbatches=1)
