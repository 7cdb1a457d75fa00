# SPDX-License-Identifier: Apache-2.0
"""Allocates the slots of a pipeline's ring buffers, from the table of a schedule.

Each device has up to five ring buffers of equal slots. A slot is occupied from the
tick of its write to that of its last read and is then free for the next value: the
linear scan of register allocation (Poletto and Sarkar 1999), which is optimal here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tessera.graph.pipelining.schedule_table import Kind, Schedule


@dataclass(frozen=True)
class Slots:
    """The sizes of five ring buffers, and the slot read or written in each tick.

    The input buffer stores inputs of virtual stages, from the tick in which they arrive
    to the last that runs the stage on them. The residual buffer stores what an F leaves
    for its B; there is none where a B runs its stage again. The cotangent buffer stores
    gradients of outputs from their arrival to the B. The weight buffer stores what a B
    leaves for its W. The end buffer stores results of the last stage from its F to its
    B, which begins with the loss.

    Every table is int32 [ticks, stages] and read-only; -1 where nothing is written or
    read. To the residual and weight buffers each tick writes, since a choice would read
    as many bytes: where it has nothing to write, to a slot that is free. The first
    virtual stage reads the microbatch itself and has no input slot. The last one begins
    the gradient itself and has no cotangent slot. Within a tick what arrived is written
    first, then F, B and W follow.

    Args:
      input_slots: Slots of the input buffer.
      residual_slots: Slots of the residual buffer.
      cotangent_slots: Slots of the cotangent buffer.
      weight_slots: Slots of the weight buffer; 0 where the backward is not split.
      end_slots: Slots of the end buffer; 0 where a B runs its stage again.
      tables: The slot of each device in each tick, by name:

        receive_forward: Input slot for what the device before sent in the last tick.
        receive_backward: Cotangent slot for what the device after sent in the last
          tick, or at the turn of a "v" the device itself.
        turned_forward: Input slot for what the device after, or at the turn the device
          itself, sent to a second chunk of a "v".
        turned_backward: Cotangent slot for what the device before sent to one.
        forward_slot: Input slot that this tick's F reads.
        backward_slot: Input slot that this tick's B reads.
        leave_slot: Residual slot that this tick's F writes, or a free one.
        residual_slot: Residual slot that this tick's B reads.
        cotangent_slot: Cotangent slot that this tick's B reads.
        keep_slot: Weight slot that this tick's B writes, or a free one.
        weight_slot: Weight slot that this tick's W reads.
        leave_end: End slot that this tick's F writes.
        end_slot: End slot that this tick's B reads.

    Example:
      >>> from tessera.graph.pipelining import schedule
      >>> slots = allocate(schedule("1f1b", stages=3, microbatches=64))
      >>> slots.input_slots, slots.residual_slots, slots.cotangent_slots
      (1, 5, 1)
      >>> slots.tables["leave_slot"][:4].tolist()
      [[0, 0, 0], [1, 0, 0], [2, 1, 0], [3, 2, 0]]
    """

    input_slots: int
    residual_slots: int
    cotangent_slots: int
    weight_slots: int
    end_slots: int
    tables: Mapping[str, np.ndarray]


def allocate(schedule: "Schedule", *, recomputes: bool = False) -> Slots:
    """The ring buffers of a legal schedule, as small as possible.

    Args:
      schedule: The schedule.
      recomputes: Whether a B runs its stage again instead of reading residuals.
    """
    stages, last = schedule.stages, schedule.virtual_stages - 1
    kinds: tuple[Kind, ...] = ("F", "B", "W")
    when = {kind: _ticks_of(schedule, kind) for kind in kinds}
    stage = np.broadcast_to(np.arange(last + 1), when["B"].shape)
    device = schedule.device_of(stage)
    is_turned = (stage >= stages) & (schedule.placement == "v")

    arrives = np.roll(when["F"], 1, axis=1) + 1
    until = when["B" if recomputes else "F"]
    inputs, input_slots = _assign_slots(arrives, until, stage > 0, device)
    keeps = np.full(stage.shape, not recomputes)
    left, residual_slots = _assign_slots(when["F"], when["B"], keeps, device)
    leave, residual_slots = _written_always(
        (when["F"], when["B"]), left, residual_slots, (schedule.ticks, stages), device
    )
    is_end = keeps & (stage == last)
    ends, end_slots = _assign_slots(when["F"], when["B"], is_end, device)
    returns = np.roll(when["B"], -1, axis=1) + 1
    cotangents, cotangent_slots = _assign_slots(
        returns, when["B"], stage < last, device
    )
    split = np.full(stage.shape, schedule.splits_backward)
    kept, weight_slots = _assign_slots(when["B"], when["W"], split, device)
    keep, weight_slots = _written_always(
        (when["B"], when["W"]), kept, weight_slots, (schedule.ticks, stages), device
    )

    def table(
        ticks: np.ndarray, slots: np.ndarray, where: np.ndarray | bool = True
    ) -> np.ndarray:
        result = np.full((schedule.ticks, stages), -1, np.int32)
        used = (slots >= 0) & where
        result[ticks[used], device[used]] = slots[used]
        result.flags.writeable = False
        return result

    return Slots(
        input_slots=input_slots,
        residual_slots=residual_slots,
        cotangent_slots=cotangent_slots,
        weight_slots=weight_slots,
        end_slots=end_slots,
        tables={
            "receive_forward": table(arrives, inputs, ~is_turned),
            "receive_backward": table(returns, cotangents, ~is_turned),
            "turned_forward": table(arrives, inputs, is_turned),
            "turned_backward": table(returns, cotangents, is_turned),
            "forward_slot": table(when["F"], inputs),
            "backward_slot": table(when["B"], inputs, recomputes),
            "leave_slot": leave,
            "residual_slot": table(when["B"], left),
            "cotangent_slot": table(when["B"], cotangents),
            "keep_slot": keep,
            "weight_slot": table(when["W"], kept),
            "leave_end": table(when["F"], ends),
            "end_slot": table(when["B"], ends),
        },
    )


def _ticks_of(schedule: "Schedule", kind: "Kind") -> np.ndarray:
    """int64 [microbatches, virtual stages]: the tick of each op of a kind, or -1."""
    ticks = np.full((schedule.microbatches, schedule.virtual_stages), -1)
    microbatch, chunk = np.moveaxis(schedule.table(kind), -1, 0)
    tick, device = np.nonzero(microbatch >= 0)
    stage = schedule.stage_of(device, chunk[tick, device])
    ticks[microbatch[tick, device], stage] = tick
    return ticks


def _assign_slots(
    start: np.ndarray, end: np.ndarray, is_stored: np.ndarray, device: np.ndarray
) -> tuple[np.ndarray, int]:
    """A slot for each lifetime, and how many slots one device needs.

    Args:
      start: int [microbatches, virtual stages], tick of the write.
      end: The same, tick of the last read; the slot is free from the next tick on.
      is_stored: bool of that shape.
      device: int of that shape, whose slots these are: each device has its own.
    """
    slots = np.full(start.shape, -1)
    num_slots = 0
    for each in range(device.max() + 1):
        microbatch, stage = np.nonzero(is_stored & (device == each))
        order = np.argsort(start[microbatch, stage], kind="stable")
        free: list[int] = []
        occupied: list[tuple[int, int]] = []
        count = 0
        for m, k in zip(microbatch[order], stage[order], strict=True):
            while occupied and occupied[0][0] < start[m, k]:
                heappush(free, heappop(occupied)[1])
            if not free:
                heappush(free, count)
                count += 1
            slots[m, k] = heappop(free)
            heappush(occupied, (int(end[m, k]), int(slots[m, k])))
        num_slots = max(num_slots, count)
    return slots, num_slots


def _written_always(
    lifetimes: tuple[np.ndarray, np.ndarray],
    slots: np.ndarray,
    count: int,
    shape: tuple[int, int],
    devices: np.ndarray,
) -> tuple[np.ndarray, int]:
    """The slot that each tick writes, a free one where it has none, and their number.

    Args:
      lifetimes: int [microbatches, virtual stages] each: the ticks of write and read.
      slots: Of these.
      count: The number of slots without free ones; 0 has no buffer.
      shape: Ticks and stages of the result.
      devices: Whose slots these are, as for ``_assign_slots``.
    """
    result = np.full(shape, -1, np.int32)
    is_free = np.ones((*shape, count + 1), bool)
    for micro, stage in zip(*np.nonzero(slots >= 0), strict=True):
        start, end = (int(ticks[micro, stage]) for ticks in lifetimes)
        device, slot = devices[micro, stage], slots[micro, stage]
        result[start, device] = slot
        is_free[start : end + 1, device, slot] = False
    if count:
        result = np.where(result >= 0, result, is_free.argmax(axis=2)).astype(np.int32)
    result.flags.writeable = False
    return result, int(result.max(initial=-1)) + 1
