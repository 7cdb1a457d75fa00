# SPDX-License-Identifier: Apache-2.0
"""The slots of a pipeline's buffers are those that its table needs, without a table."""

import pytest

from tessera.graph.pipelining import schedule
from tessera.graph.pipelining.buffer_slots import allocate
from tessera.train.planner.layout import Layout
from tessera.train.planner.memory_model import slots_of


@pytest.mark.parametrize("remat", ["full", "named"])
@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        ("1f1b", 1),
        ("gpipe", 1),
        ("interleaved", 2),
        ("zero_bubble", 1),
        ("dualpipev", 2),
    ],
)
def test_slots_are_those_of_the_table(name, chunks, remat):
    for stages in (2, 4, 8):
        for count in (stages, 2 * stages, 4 * stages, 8 * stages):
            if name == "dualpipev" and count < 2 * stages:
                continue
            layout = Layout(
                (("pp", stages),), 1, count, remat, schedule=name, chunks=chunks
            )
            table = schedule(name, stages, count, chunks if chunks > 1 else None)
            slots = allocate(table, recomputes=remat == "full")
            wires = slots.input_slots + slots.end_slots
            found = wires, slots.residual_slots, slots.weight_slots
            predicted = slots_of(layout)
            assert predicted[2] == found[2]
            # Of few microbatches a slot more or less, of many exactly.
            most = 1 if count <= 2 * stages else 0
            for ours, its in zip(predicted[:2], found[:2], strict=True):
                assert abs(ours - its) <= most, (stages, count)
