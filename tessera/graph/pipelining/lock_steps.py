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
    units = _units(like, orders)
    placed: list[Placed] = []
    tick, cells, done = 0, set[tuple[int, Kind]](), set[Key]()
    for unit in sorted(units):
        row = units[unit]
        keys = {_key(like, device, op) for device, op in row}
        busy = {(device, op.kind) for device, op in row}
        if not cells.isdisjoint(busy) or not done.isdisjoint(map(_needed, keys)):
            tick, cells, done = tick + 1, set(), set()
        cells |= busy
        done |= keys
        placed += [(tick, device, op) for device, op in row]
    return placed


def _units(
    like: Schedule, orders: Sequence[Sequence[Block]]
) -> dict[int, list[tuple[int, Op]]]:
    """What each device does in each unit of time, from 0.

    A block begins when all that it needs has arrived, and sends what it has at its end.
    """
    units: dict[int, list[tuple[int, Op]]] = {}
    ends: dict[Key, int] = {}
    left = [list(reversed(order)) for order in orders]
    clock = [0] * len(orders)
    while any(left):
        for device, blocks in enumerate(left):
            while blocks:
                keys = [_key(like, device, op) for op in blocks[-1]]
                needs = [_needed(key) for key in keys if _has_needs(like, key)]
                if not all(key in ends for key in needs):
                    break
                start = max([clock[device], *(ends[key] for key in needs)])
                block = blocks.pop()
                clock[device] = start + len(block)
                ends |= dict.fromkeys(keys, clock[device])
                for unit, op in enumerate(block, start):
                    units.setdefault(unit, []).append((device, op))
    return units


def _key(like: Schedule, device: int, op: Op) -> Key:
    return op.kind, op.microbatch, like.stage_of(device, op.chunk)


def _needed(key: Key) -> Key:
    """What another device sends for an op: the same of the stage before or after."""
    kind, microbatch, stage = key
    return kind, microbatch, stage - 1 if kind == "F" else stage + 1


def _has_needs(like: Schedule, key: Key) -> bool:
    kind, _, stage = key
    return kind != "W" and stage != (0 if kind == "F" else like.virtual_stages - 1)
