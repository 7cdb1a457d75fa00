# SPDX-License-Identifier: Apache-2.0
"""Packs what each device does, in an order of its own, into lock-step ticks.

Papers give a schedule as the order of a device's work, which begins as soon as what it
needs has arrived. Here F, B and W take one unit of time each. The units follow each
other as ticks, several in one where a device has at most one op of a kind in them, and
no op that another of them needs. So the ticks take no longer than the units, and as few
of them send as there can be.
"""

from collections.abc import Sequence

from tessera.graph.pipelining.schedule_table import Kind, Op, Schedule

Block = Sequence[Op]  # what a device does together, in units that follow each other
Placed = tuple[int, int, Op]  # tick, device, op
Key = tuple[Kind, int, int]  # kind, microbatch, virtual stage


def lock_steps(like: Schedule, orders: Sequence[Sequence[Block]]) -> list[Placed]:
    """The ops of all devices with their ticks.

    Args:
      like: A schedule with the placement of the stages; its cells are not read.
      orders: For each device its blocks, which all together are legal.
    """
    placed: list[Placed] = []
    tick, cells, done = 0, set[tuple[int, Kind]](), set[Key]()
    for _, unit in sorted(_units(like, orders).items()):
        busy = {(device, op.kind) for device, op in unit}
        needs = {_keys(like, device, op)[1] for device, op in unit}
        if not cells.isdisjoint(busy) or not done.isdisjoint(needs):
            tick, cells, done = tick + 1, set(), set()
        cells |= busy
        done |= {_keys(like, device, op)[0] for device, op in unit}
        placed += [(tick, device, op) for device, op in unit]
    return placed


def _units(
    like: Schedule, orders: Sequence[Sequence[Block]]
) -> dict[int, list[tuple[int, Op]]]:
    """What each device does in each unit of time, from 0.

    A block begins when all that it needs has arrived, and sends what it has at its end.
    """
    units: dict[int, list[tuple[int, Op]]] = {}
    ends: dict[Key | None, int] = {None: 0}
    left = [list(reversed(order)) for order in orders]
    clock = [0] * len(orders)
    while any(left):
        for device, blocks in enumerate(left):
            while blocks:
                keys = [_keys(like, device, op) for op in blocks[-1]]
                if any(needed not in ends for _, needed in keys):
                    break
                start = max([clock[device], *(ends[needed] for _, needed in keys)])
                block = blocks.pop()
                clock[device] = start + len(block)
                ends |= dict.fromkeys((own for own, _ in keys), clock[device])
                for unit, op in enumerate(block, start):
                    units.setdefault(unit, []).append((device, op))
    return units


def _keys(like: Schedule, device: int, op: Op) -> tuple[Key, Key | None]:
    """An op, and the one of another stage that it needs, if there is one."""
    stage = like.stage_of(device, op.chunk)
    before = {"F": stage - 1, "B": stage + 1, "W": -1}[op.kind]
    has_needs = 0 <= before < like.virtual_stages
    needed = (op.kind, op.microbatch, before) if has_needs else None
    return (op.kind, op.microbatch, stage), needed
