# SPDX-License-Identifier: Apache-2.0
"""A schedule as data: what the loop reads and what is counted from it."""

import re
from functools import partial

import numpy as np
import pytest

from tessera.graph.pipelining import Op, custom, schedule
from tessera.graph.pipelining.schedule_table import KINDS


def test_the_tables_that_the_loop_reads_say_microbatch_and_chunk():
    table = schedule("interleaved", 2, 2, 2)
    forward = table.table("F")
    assert forward.dtype == np.int32
    assert forward.shape == (table.ticks, 2, 2)
    assert forward[:6, 0].tolist() == [
        [0, 0],
        [1, 0],
        [0, 1],
        [1, 1],
        [-1, -1],
        [-1, -1],
    ]
    assert (table.table("W") == -1).all()
    with pytest.raises(ValueError, match="read-only"):
        forward[0, 0, 0] = 3


def test_tables_hold_exactly_the_ops_of_the_cells():
    made = schedule("zero_bubble", 3, 4)
    listed = {
        (kind, tick, device, *map(int, made.table(kind)[tick, device]))
        for kind in ("F", "B", "W")
        for tick, device in np.argwhere(made.table(kind)[..., 0] >= 0).tolist()
    }
    assert listed == {
        (op.kind, tick, device, op.microbatch, op.chunk)
        for tick, device, op in made.placed()
    }


def test_a_tick_lasts_as_long_as_its_longest_device():
    cells = [
        [[Op("F", 0)], []],
        [[Op("F", 1)], [Op("F", 0), Op("B", 0)]],
        [[Op("B", 0)], [Op("F", 1), Op("B", 1)]],
        [[Op("B", 1)], []],
    ]
    table = custom(cells, microbatches=2)
    assert table.costs().tolist() == [[1, 0], [1, 3], [2, 3], [2, 0]]
    assert table.idle_fraction() == pytest.approx(1 - 12 / (2 * 9))
    assert table.idle_fraction(forward=2, backward=2) == pytest.approx(1 - 16 / 24)


def test_a_split_backward_costs_one_and_leaves_one_for_the_weights():
    table = schedule("zero_bubble", 2, 3)
    assert table.costs().sum() == 3 * 2 * 3
    assert table.costs(forward=1, backward=2, weight=4).sum() == 7 * 2 * 3


def test_a_chunk_costs_its_share_of_the_device():
    assert schedule("interleaved", 2, 4, 4).costs().sum() == pytest.approx(3 * 2 * 4)


def test_schedules_with_the_same_table_are_equal_and_hash_alike():
    assert schedule("1f1b", 2, 4) == schedule("1f1b", 2, 4)
    assert hash(schedule("1f1b", 2, 4)) == hash(schedule("1f1b", 2, 4))
    assert schedule("1f1b", 2, 4) != schedule("1f1b", 2, 5)


def test_ticks_are_busy_in_which_one_device_works():
    every = slice(0, 5)
    table = schedule("1f1b", 2, 3)
    busy = partial(table.busy_ticks, ticks=every, recomputes=False)
    assert {kind: busy(kind) for kind in KINDS} == {"F": 4, "B": 4, "W": 0}
    assert table.busy_ticks("B", slice(0, 2), recomputes=False) == 1


def test_a_forward_that_is_repeated_is_none_in_the_last_stage():
    # F2 of device 1 is alone in a tick.
    table = schedule("1f1b", 2, 3)
    assert table.busy_ticks("F", slice(0, 5), recomputes=True) == 3


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
