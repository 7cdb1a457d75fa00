# SPDX-License-Identifier: Apache-2.0
"""Checks that a pipeline schedule can be executed, and lists every reason if not.

Users may write tables; the loop that executes them checks nothing.
"""

from collections.abc import Iterator
from itertools import product
from typing import get_args

from tessera.errors import ScheduleError
from tessera.graph.pipelining.schedule_table import KINDS, Kind, Placement, Schedule

MOST_PROBLEMS = 12

Ticks = dict[tuple[Kind, int, int], list[int]]  # kind, microbatch, virtual stage


def check(schedule: Schedule) -> None:
    """Check a table that the loop is to execute.

    A legal table does every F, every B and, where the backward is split, every W of
    each microbatch and virtual stage exactly once, at most one of a kind per device and
    tick. An F comes in a later tick than the F of the stage before; a B in a later tick
    than the B of the stage after, and not before its own F; a W not before its own B.
    Which stages are neighbors the placement says.

    Args:
      schedule: Any table.

    Raises:
      ScheduleError: [T309] it is not legal; the message lists what is wrong.

    Example:
      >>> from tessera.graph.pipelining import schedule
      >>> check(schedule("zero_bubble", stages=4, microbatches=8))
    """
    problems = list(_invalid_cells(schedule))
    if not problems:
        ticks = _ticks(schedule)
        problems = [*_wrong_counts(schedule, ticks), *_wrong_order(schedule, ticks)]
    if problems:
        shown = problems[:MOST_PROBLEMS]
        if len(problems) > len(shown):
            shown.append(f"and {len(problems) - len(shown)} more")
        raise ScheduleError(
            f"the pipeline schedule {schedule.name!r} cannot be executed",
            got="\n".join(shown),
            fix="give every F, B and W one place, each after what it needs; "
            "schedule.as_text() shows the table",
        )


def _invalid_cells(schedule: Schedule) -> Iterator[str]:
    """Cells that do not match the sizes of the schedule, and wrong placements."""
    placement, known = schedule.placement, get_args(Placement)
    if placement not in known:
        yield f"placement {placement!r} is not one of {', '.join(known)}"
    if placement == "v" and schedule.chunks != 2:
        yield f"placement 'v' has two chunks on each device, not {schedule.chunks}"
    kinds = KINDS if schedule.splits_backward else KINDS[:2]
    for tick, row in enumerate(schedule.cells):
        if len(row) != schedule.stages:
            yield f"tick {tick} has {len(row)} cells for {schedule.stages} devices"
        for device, cell in enumerate(row):
            where = f"tick {tick}, device {device}"
            for kind in KINDS:
                if (number := sum(op.kind == kind for op in cell)) > 1:
                    yield f"{where}: {number} ops of kind {kind} in one tick"
            for op in cell:
                if op.kind not in kinds:
                    yield f"{where}: kind {op.kind!r} is not one of {', '.join(kinds)}"
                for name, number, count in (
                    ("microbatch", op.microbatch, schedule.microbatches),
                    ("chunk", op.chunk, schedule.chunks),
                ):
                    if not 0 <= number < count:
                        yield f"{where}: {name} {number} is not in 0 to {count - 1}"


def _ticks(schedule: Schedule) -> Ticks:
    kinds = KINDS if schedule.splits_backward else KINDS[:2]
    microbatches, stages = range(schedule.microbatches), range(schedule.virtual_stages)
    ticks: Ticks = {key: [] for key in product(kinds, microbatches, stages)}
    for tick, device, op in schedule.placed():
        stage = schedule.stage_of(device, op.chunk)
        ticks[op.kind, op.microbatch, stage].append(tick)
    return ticks


def _wrong_counts(schedule: Schedule, ticks: Ticks) -> Iterator[str]:
    for key, done in ticks.items():
        if not done:
            yield f"{_label(schedule, *key)} is missing"
        elif len(done) > 1:
            yield f"{_label(schedule, *key)} is done {len(done)} times: ticks {done}"


def _wrong_order(schedule: Schedule, ticks: Ticks) -> Iterator[str]:
    # Each kind's dependencies: (kind, offset of the stage, ticks in between).
    needs: dict[Kind, list[tuple[Kind, int, int]]] = {
        "F": [("F", -1, 1)],
        "B": [("B", 1, 1), ("F", 0, 0)],
        "W": [("B", 0, 0)],
    }
    for (kind, m, stage), done in ticks.items():
        for needed, step, wait in needs[kind]:
            before = ticks.get((needed, m, stage + step))
            if not done or not before:
                continue  # an end of the pipeline, or missing, which is reported
            if min(done) < max(before) + wait:
                yield (
                    f"{_label(schedule, kind, m, stage)} at tick {min(done)} is "
                    f"{'not after' if wait else 'before'} "
                    f"{_label(schedule, needed, m, stage + step)} at tick {max(before)}"
                )


def _label(schedule: Schedule, kind: Kind, microbatch: int, stage: int) -> str:
    chunk, device = stage // schedule.stages, schedule.device_of(stage)
    where = f"device {device}" + (f", chunk {chunk}" if schedule.chunks > 1 else "")
    return f"{kind}{microbatch} of {where}"
