# SPDX-License-Identifier: Apache-2.0
"""Legal tables are taken, and whatever spoils one is refused and named."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.errors import ScheduleError
from tessera.graph.pipelining import Op, Schedule, custom, schedule
from tessera.graph.pipelining.named_schedules import NAMES, one_f_one_b
from tessera.graph.pipelining.schedule_legality import check
from tessera.graph.pipelining.schedule_table import KINDS

Grid = list[list[list[Op]]]


def grid_of(table: Schedule) -> Grid:
    return [[list(cell) for cell in row] for row in table.cells]


def with_cells(table: Schedule, grid: Grid) -> Schedule:
    cells = tuple(tuple(tuple(cell) for cell in row) for row in grid)
    return replace(table, cells=cells)


@st.composite
def tables(draw: st.DrawFn) -> Schedule:
    name, stages = draw(st.sampled_from(NAMES)), draw(st.integers(1, 4))
    if name == "interleaved":
        groups, chunks = draw(st.integers(1, 2)), draw(st.integers(1, 3))
        return schedule(name, stages, groups * stages, chunks)
    least = 2 * stages if name == "dualpipev" else 1
    return schedule(name, stages, draw(st.integers(least, least + 5)))


def is_executable(table: Schedule) -> bool:
    """Another way to say what is legal: execute the table and see what it lacks."""
    last = table.virtual_stages - 1
    kinds = KINDS if table.splits_backward else KINDS[:2]
    done: set[tuple[str, int, int]] = set()
    for row in table.cells:
        before = frozenset(done)
        for device, cell in enumerate(row):
            if len({op.kind for op in cell}) < len(cell):
                return False
            for op in sorted(cell, key=lambda op: KINDS.index(op.kind)):
                m, stage = op.microbatch, op.chunk * table.stages + device
                if table.placement == "v" and op.chunk:
                    stage = 2 * table.stages - 1 - device
                if (op.kind, m, stage) in done:
                    return False
                if op.kind == "F" and stage > 0 and ("F", m, stage - 1) not in before:
                    return False
                if op.kind == "B" and ("F", m, stage) not in done:
                    return False
                if op.kind == "W" and ("B", m, stage) not in done:
                    return False
                sent = ("B", m, stage + 1)
                if op.kind == "B" and stage < last and sent not in before:
                    return False
                done.add((op.kind, m, stage))
    everything = {
        (kind, m, stage)
        for kind in kinds
        for m in range(table.microbatches)
        for stage in range(last + 1)
    }
    return done == everything


def is_legal(table: Schedule) -> bool:
    try:
        check(table)
    except ScheduleError:
        return False
    return True


@given(tables())
def test_the_named_schedules_are_legal(table):
    check(table)
    assert is_executable(table)


@given(tables(), st.randoms(use_true_random=False))
def test_a_table_with_an_op_left_out_or_done_twice_is_refused(table, rng):
    tick, device, op = rng.choice(list(table.placed()))
    missing, twice = grid_of(table), grid_of(table)
    missing[tick][device].remove(op)
    rng.choice(twice)[device].append(op)
    for grid in (missing, twice):
        with pytest.raises(ScheduleError, match=r"is missing|times|ops of kind"):
            check(with_cells(table, grid))


@given(tables(), st.randoms(use_true_random=False))
def test_a_table_with_an_op_changed_for_another_is_refused(table, rng):
    tick, device, op = rng.choice(list(table.placed()))
    other = rng.choice(
        [
            replace(op, microbatch=op.microbatch + rng.choice([-1, 1])),
            replace(op, chunk=op.chunk + rng.choice([-1, 1])),
            replace(op, kind=rng.choice([kind for kind in KINDS if kind != op.kind])),
        ]
    )
    grid = grid_of(table)
    grid[tick][device][grid[tick][device].index(op)] = other
    with pytest.raises(ScheduleError):
        check(with_cells(table, grid))


def moved(table: Schedule, rng: random.Random) -> Schedule:
    """An op, or a whole cell's worth, taken to another tick of its device."""
    grid = grid_of(table)
    tick, device, op = rng.choice(list(table.placed()))
    grid[tick][device].remove(op)
    grid[rng.randrange(len(grid))][device].append(op)
    return with_cells(table, grid)


@given(tables(), st.randoms(use_true_random=False), st.integers(1, 3))
def test_a_table_is_legal_exactly_if_it_can_be_executed(table, rng, moves):
    for _ in range(moves):
        table = moved(table, rng)
    assert is_legal(table) == is_executable(table)


@given(tables(), st.randoms(use_true_random=False))
def test_an_op_before_what_it_needs_is_refused(table, rng):
    ticks = {(op.kind, op.microbatch, op.chunk, d): t for t, d, op in table.placed()}
    place, tick = rng.choice([item for item in ticks.items() if item[0][0] != "F"])
    kind, m, chunk, device = place
    needed = ticks["F" if kind == "B" else "B", m, chunk, device]
    if needed == 0:
        return
    grid = grid_of(table)
    grid[tick][device].remove(Op(kind, m, chunk))
    grid[needed - 1][device] = [Op(kind, m, chunk)]
    with pytest.raises(ScheduleError):
        check(with_cells(table, grid))


@pytest.mark.parametrize(
    ("placement", "chunks", "got"),
    [
        ("w", 2, "placement 'w' is not one of loop, v"),
        ("v", 1, "placement 'v' has two chunks on each device, not 1"),
        ("v", 3, "placement 'v' has two chunks on each device, not 3"),
    ],
)
def test_a_placement_that_no_loop_executes_is_refused(placement, chunks, got):
    cells = schedule("interleaved", 2, 2, chunks).cells
    with pytest.raises(ScheduleError) as caught:
        custom(cells, microbatches=2, chunks=chunks, placement=placement)
    assert caught.value.got == got


def test_neighbors_of_a_table_are_those_of_its_placement():
    made = schedule("dualpipev", 2, 4)
    sizes = {"microbatches": 4, "chunks": 2, "splits_backward": True}
    assert custom(made.cells, placement="v", **sizes).cells == made.cells
    with pytest.raises(ScheduleError, match="F0 of device 1, chunk 1 at tick 2 is not"):
        custom(made.cells, **sizes)
    loop = schedule("interleaved", 2, 4)
    with pytest.raises(ScheduleError, match="F0 of device 0, chunk 1 at tick 2 is not"):
        custom(loop.cells, placement="v", microbatches=4, chunks=2)


def test_the_message_lists_everything_that_is_wrong():
    grid = grid_of(one_f_one_b(2, 2))
    grid[1][1], grid[0][1] = [], [Op("F", 0), Op("B", 0)]
    grid[3][0] = []
    with pytest.raises(ScheduleError) as caught:
        check(with_cells(one_f_one_b(2, 2), grid))
    assert str(caught.value) == (
        "[T309] the pipeline schedule '1f1b' cannot be executed\n"
        "  got: B1 of device 0 is missing\n"
        "  got: F0 of device 1 at tick 0 is not after F0 of device 0 at tick 0\n"
        "  fix: give every F, B and W one place, each after what it needs; "
        "schedule.as_text() shows the table\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T309.html"
    )


def test_cells_that_do_not_fit_the_sizes_are_named_first():
    table = schedule("interleaved", 2, 2, 2)
    grid = grid_of(table)
    grid[0][0] = [Op("F", 0, 2), Op("F", 5, 0), Op("W", 0, 0)]
    grid[1].pop()
    with pytest.raises(ScheduleError) as caught:
        check(with_cells(table, grid))
    assert [line for line in str(caught.value).splitlines() if "got" in line] == [
        "  got: tick 0, device 0: 2 ops of kind F in one tick",
        "  got: tick 0, device 0: chunk 2 is not in 0 to 1",
        "  got: tick 0, device 0: microbatch 5 is not in 0 to 1",
        "  got: tick 0, device 0: kind 'W' is not one of F, B",
        "  got: tick 1 has 1 cells for 2 devices",
    ]


def test_a_chunk_is_named_where_there_are_several():
    table = schedule("interleaved", 2, 2, 2)
    grid = grid_of(table)
    grid[2][0].append(grid[4][0].pop())
    with pytest.raises(
        ScheduleError, match="B0 of device 0, chunk 1 at tick 2 is not after B0 of dev"
    ):
        check(with_cells(table, grid))


def test_a_long_list_is_cut():
    table = one_f_one_b(4, 8)
    empty = with_cells(table, [[[] for _ in row] for row in table.cells])
    with pytest.raises(ScheduleError, match="  got: and 52 more\n"):
        check(empty)
