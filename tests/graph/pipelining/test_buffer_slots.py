# SPDX-License-Identifier: Apache-2.0
"""Rings: what is read is what was meant, in as few slots as there can be."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.graph.pipelining import Op, Schedule, custom, schedule
from tessera.graph.pipelining.buffer_slots import Slots, allocate
from tessera.graph.pipelining.named_schedules import NAMES
from tessera.graph.pipelining.schedule_table import KINDS


def execute(table: Schedule) -> None:
    for recomputes in (False, True):
        execute_with(table, allocate(table, recomputes=recomputes), recomputes)


def execute_with(table: Schedule, slots: Slots, recomputes: bool) -> None:
    """The loop over ticks with names instead of arrays; fails at any wrong read.

    A name is (microbatch, virtual stage that reads it).
    """
    stages = table.stages
    inputs = [[None] * slots.input_slots for _ in range(stages)]
    left = [[None] * slots.residual_slots for _ in range(stages)]
    cotangents = [[None] * slots.cotangent_slots for _ in range(stages)]
    kept = [[None] * slots.weight_slots for _ in range(stages)]
    ends = [[None] * slots.end_slots for _ in range(stages)]
    sent: dict[str, list] = {"F": [None] * stages, "B": [None] * stages}
    for tick in range(table.ticks):
        arrived, sent = sent, {"F": [None] * stages, "B": [None] * stages}
        for device in range(stages):
            if (slot := slots.tables["receive_forward"][tick, device]) >= 0:
                inputs[device][slot] = arrived["F"][device - 1]
            if (slot := slots.tables["receive_backward"][tick, device]) >= 0:
                cotangents[device][slot] = arrived["B"][after(table, device)]
            if (slot := slots.tables["turned_forward"][tick, device]) >= 0:
                inputs[device][slot] = arrived["F"][after(table, device)]
            if (slot := slots.tables["turned_backward"][tick, device]) >= 0:
                cotangents[device][slot] = arrived["B"][device - 1]
            rings = [ring[device] for ring in (inputs, left, cotangents, kept, ends)]
            run(table, slots, recomputes, (tick, device), rings, sent)


def after(table: Schedule, device: int) -> int:
    """Who is behind a device: in a "v" the last one sends to itself."""
    turns = table.placement == "v" and device == table.stages - 1
    return device if turns else (device + 1) % table.stages


def run(table, slots, recomputes, place, rings, sent) -> None:
    last, (tick, device) = table.virtual_stages - 1, place
    inputs, left, cotangents, kept, ends = rings
    # Every tick writes these buffers, at first what is then overwritten.
    for ring, slot in (
        (left, slots.tables["leave_slot"]),
        (kept, slots.tables["keep_slot"]),
    ):
        if ring:
            ring[slot[tick, device]] = None

    def read(ring: list, slots_read: np.ndarray, me: tuple, has_slot: bool) -> None:
        slot = slots_read[tick, device]
        assert (slot >= 0) == has_slot
        assert not has_slot or ring[slot] == me

    for kind in KINDS:
        m, chunk = table.table(kind)[tick, device].tolist()
        stage = chunk * table.stages + device
        if table.placement == "v" and chunk:
            stage = 2 * table.stages - 1 - device
        if m >= 0 and kind == "F":
            read(inputs, slots.tables["forward_slot"], (m, stage), stage > 0)
            if not recomputes and stage == last:
                ends[slots.tables["leave_end"][tick, device]] = (m, stage)
            if not recomputes:
                left[slots.tables["leave_slot"][tick, device]] = (m, stage)
            sent["F"][device] = (m, stage + 1)
        elif m >= 0 and kind == "B":
            is_end = not recomputes and stage == last
            read(ends, slots.tables["end_slot"], (m, stage), is_end)
            read(
                inputs,
                slots.tables["backward_slot"],
                (m, stage),
                recomputes and stage > 0,
            )
            read(left, slots.tables["residual_slot"], (m, stage), not recomputes)
            read(cotangents, slots.tables["cotangent_slot"], (m, stage), stage < last)
            sent["B"][device] = (m, stage - 1)
            if table.splits_backward:
                kept[slots.tables["keep_slot"][tick, device]] = (m, stage)
        elif m >= 0:
            read(kept, slots.tables["weight_slot"], (m, stage), has_slot=True)


@given(st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 9), st.integers(1, 3))
def test_every_op_reads_what_was_sent_for_it(name, stages, microbatches, chunks):
    if name == "interleaved":
        execute(schedule(name, stages, stages * -(-microbatches // 3), chunks))
    else:
        least = 2 * stages if name == "dualpipev" else 0
        execute(schedule(name, stages, least + microbatches))


@pytest.mark.full
@given(st.sampled_from(NAMES), st.integers(2, 5), st.randoms(use_true_random=False))
def test_so_does_it_in_a_table_with_arbitrary_waits(name, stages, rng):
    made = schedule(name, stages, 2 * stages)
    # Each op in an order that keeps what it needs before it, at a tick of its own.
    rows = []
    for row in made.cells:
        for kind in KINDS:
            cells = [[op for op in cell if op.kind == kind] for cell in row]
            late = {d for d in range(stages) if rng.random() < 0.5}
            rows.append([[] if d in late else cell for d, cell in enumerate(cells)])
            rows.append([cell if d in late else [] for d, cell in enumerate(cells)])
    table = custom(
        [row for row in rows if any(row)],
        microbatches=made.microbatches,
        chunks=made.chunks,
        splits_backward=made.splits_backward,
        placement=made.placement,
    )
    execute(table)


@pytest.mark.parametrize("name", NAMES)
def test_no_ring_has_a_slot_more_than_are_in_use_at_once(name):
    table = schedule(name, 4, 12)
    ticks = {
        (op.kind, op.microbatch, table.stage_of(device, op.chunk)): tick
        for tick, device, op in table.placed()
    }
    owner, last = table.device_of, table.virtual_stages - 1
    inputs = np.zeros((table.ticks, 4), int)
    left = np.ones((table.ticks, 4), int)  # every tick writes somewhere
    for (kind, m, stage), tick in ticks.items():
        if kind == "F" and stage < last:
            inputs[tick + 1 : ticks["B", m, stage + 1] + 1, owner(stage + 1)] += 1
        if kind == "F":
            left[tick : ticks["B", m, stage] + 1, owner(stage)] += 1
            left[tick, owner(stage)] -= 1
    assert allocate(table, recomputes=True).input_slots == inputs.max()
    assert allocate(table).residual_slots == left.max()


def test_one_device_keeps_only_what_it_sends_to_itself():
    slots = allocate(schedule("1f1b", 1, 4))
    assert (slots.input_slots, slots.residual_slots) == (0, 1)
    assert (slots.cotangent_slots, slots.weight_slots) == (0, 0)
    # With two chunks the second one's input comes round to the same device.
    slots = allocate(schedule("interleaved", 1, 4, chunks=2))
    assert (slots.input_slots, slots.cotangent_slots) == (1, 1)


def test_the_tables_cannot_be_written():
    slots = allocate(schedule("1f1b", 2, 4))
    assert slots.tables["receive_forward"].dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        slots.tables["receive_forward"][0, 0] = 1


def test_what_waits_takes_a_slot_for_as_long():
    """Device 1 gets both inputs before it runs either."""
    forwards = [[[Op("F", 0)], []], [[Op("F", 1)], []]]
    second = [[[], [Op("F", m), Op("B", m)]] for m in (0, 1)]
    first = [[[Op("B", 0)], []], [[Op("B", 1)], []]]
    slots = allocate(custom([*forwards, *second, *first], microbatches=2))
    assert slots.tables["receive_forward"].tolist() == [
        [-1, -1],
        [-1, 0],
        [-1, 1],
        [-1, -1],
        [-1, -1],
        [-1, -1],
    ]
    assert slots.tables["forward_slot"][:, 1].tolist() == [-1, -1, 0, 1, -1, -1]
    assert slots.tables["receive_backward"][:, 0].tolist() == [-1, -1, -1, 0, 1, -1]
    assert slots.tables["cotangent_slot"][:, 0].tolist() == [-1, -1, -1, -1, 0, 1]
    assert (slots.input_slots, slots.cotangent_slots) == (2, 2)
