# SPDX-License-Identifier: Apache-2.0
"""Where a device of a pipeline keeps what was sent to it until it is read.

Computed from the table of a ``Schedule``. Each device has up to three rings of equal
slots. A slot is taken for the ticks from the first write to the last read and is then
given to the next comer, by the linear scan that compilers use for registers (Poletto
and Sarkar 1999), so no table needs a slot less than it gets.
"""

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tessera.compiler.pipelining.schedule_table import Kind, Schedule


@dataclass(frozen=True)
class Slots:
    """The three rings of a schedule, and which slot is written and read in which tick.

    The input ring holds inputs of virtual stages, from the tick in which they arrive to
    their B. The cotangent ring holds gradients of outputs from their arrival to the B.
    The weight ring holds what a B keeps for its W, which reads nothing else.

    Every table is int32 [ticks, stages] and read-only; -1 where nothing is written or
    read. The first virtual stage reads the microbatch itself and has no input slot, the
    last one begins the gradient itself and has no cotangent slot. Within a tick what
    arrives is written first, then come F, B and W.

    Args:
      stash_slots: Slots of the input ring.
      cotangent_slots: Slots of the cotangent ring.
      weight_slots: Slots of the weight ring; 0 where the backward is not split.
      receive_forward: Input slot for what the device before sent in the last tick.
      receive_backward: Cotangent slot for what the device after sent in the last tick.
      forward_slot: Input slot that this tick's F reads.
      backward_slot: Input slot that this tick's B reads.
      cotangent_slot: Cotangent slot that this tick's B reads.
      keep_slot: Weight slot that this tick's B writes.
      weight_slot: Weight slot that this tick's W reads.

    Example:
      >>> from tessera.compiler.pipelining import schedule
      >>> slots = schedule("1f1b", stages=3, microbatches=64).slots
      >>> slots.stash_slots, slots.cotangent_slots, slots.weight_slots
      (3, 1, 0)
      >>> slots.receive_forward[:4].tolist()
      [[-1, -1, -1], [-1, 0, -1], [-1, 1, 0], [-1, 2, 0]]
    """

    stash_slots: int
    cotangent_slots: int
    weight_slots: int
    receive_forward: np.ndarray
    receive_backward: np.ndarray
    forward_slot: np.ndarray
    backward_slot: np.ndarray
    cotangent_slot: np.ndarray
    keep_slot: np.ndarray
    weight_slot: np.ndarray


def allocate(schedule: "Schedule") -> Slots:
    """The rings of a legal schedule, as small as they can be."""
    stages, last = schedule.stages, schedule.virtual_stages - 1
    kinds: tuple[Kind, ...] = ("F", "B", "W")
    when = {kind: _ticks_of(schedule, kind) for kind in kinds}
    stage = np.broadcast_to(np.arange(last + 1), when["B"].shape)

    arrives = np.roll(when["F"], 1, axis=1) + 1
    inputs, stash_slots = _colored(arrives, when["B"], stage > 0, stages)
    returns = np.roll(when["B"], -1, axis=1) + 1
    cotangents, cotangent_slots = _colored(returns, when["B"], stage < last, stages)
    split = np.full(stage.shape, schedule.splits_backward)
    kept, weight_slots = _colored(when["B"], when["W"], split, stages)

    def table(ticks: np.ndarray, slots: np.ndarray) -> np.ndarray:
        result = np.full((schedule.ticks, stages), -1, np.int32)
        used = slots >= 0
        result[ticks[used], stage[used] % stages] = slots[used]
        result.flags.writeable = False
        return result

    return Slots(
        stash_slots=stash_slots,
        cotangent_slots=cotangent_slots,
        weight_slots=weight_slots,
        receive_forward=table(arrives, inputs),
        receive_backward=table(returns, cotangents),
        forward_slot=table(when["F"], inputs),
        backward_slot=table(when["B"], inputs),
        cotangent_slot=table(when["B"], cotangents),
        keep_slot=table(when["B"], kept),
        weight_slot=table(when["W"], kept),
    )


def _ticks_of(schedule: "Schedule", kind: "Kind") -> np.ndarray:
    """int64 [microbatches, virtual stages]: the tick of each op of a kind, or -1."""
    ticks = np.full((schedule.microbatches, schedule.virtual_stages), -1)
    microbatch, chunk = np.moveaxis(schedule.table(kind), -1, 0)
    tick, device = np.nonzero(microbatch >= 0)
    stage = chunk[tick, device] * schedule.stages + device
    ticks[microbatch[tick, device], stage] = tick
    return ticks


def _colored(
    start: np.ndarray, end: np.ndarray, wanted: np.ndarray, stages: int
) -> tuple[np.ndarray, int]:
    """A slot for each lifetime that is wanted, and how many slots one device needs.

    Args:
      start: int [microbatches, virtual stages], tick of the write.
      end: The same, tick of the last read; the slot is free from the next tick on.
      wanted: bool of that shape.
      stages: Devices, each with slots of its own.
    """
    slots = np.full(start.shape, -1)
    num_slots = 0
    for device in range(stages):
        microbatch, chunk = np.nonzero(wanted[:, device::stages])
        stage = chunk * stages + device
        order = np.argsort(start[microbatch, stage], kind="stable")
        free: list[int] = []
        held: list[tuple[int, int]] = []
        made = 0
        for m, k in zip(microbatch[order], stage[order], strict=True):
            while held and held[0][0] < start[m, k]:
                heappush(free, heappop(held)[1])
            if not free:
                heappush(free, made)
                made += 1
            slots[m, k] = heappop(free)
            heappush(held, (int(end[m, k]), int(slots[m, k])))
        num_slots = max(num_slots, made)
    return slots, num_slots
