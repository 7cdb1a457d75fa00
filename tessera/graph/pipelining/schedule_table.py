# SPDX-License-Identifier: Apache-2.0
"""Defines a pipeline schedule: a table of each device's work in each tick.

:mod:`.named_schedules` builds tables, :mod:`.schedule_legality` checks them,
:mod:`.buffer_slots` allocates the ring buffers that they need, and
:mod:`.schedule_loop` executes them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from string import ascii_lowercase
from typing import Any, Literal

import numpy as np

Placement = Literal["loop", "v"]
Kind = Literal["F", "B", "W"]
KINDS: tuple[Kind, ...] = ("F", "B", "W")


def stage_of(placement: Placement, stages: int, device: Any, chunk: Any) -> Any:
    """The virtual stage that is a chunk of a device; integers or arrays of them.

    Example:
      >>> [stage_of("v", 2, device, chunk) for chunk in (0, 1) for device in (0, 1)]
      [0, 1, 3, 2]
    """
    if placement == "v":
        return device + chunk * (2 * stages - 1 - 2 * device)
    return chunk * stages + device


@dataclass(frozen=True)
class Op:
    """One operation of one device, on one microbatch.

    Args:
      kind: "F" is the forward of a chunk. "B" is its backward: the gradient of its
        input and, in a schedule that does not split the backward, of its weights. "W"
        is the gradient of its weights alone.
      microbatch: Which microbatch, from 0.
      chunk: Which of the chunks of layers that the device holds, from 0.
    """

    kind: Kind
    microbatch: int
    chunk: int = 0


Cells = tuple[tuple[tuple[Op, ...], ...], ...]


@dataclass(frozen=True)
class Schedule:
    """The work of each device of a pipeline, tick by tick.

    The layers are split into ``virtual_stages`` = ``stages`` x ``chunks``; virtual
    stage k is chunk k // ``stages`` of a device, which the placement says. Devices go
    in lock-step. In one tick a device does at most one F, one B and one W, in this
    order. It then sends an activation to the next virtual stage and a gradient to the
    previous one, which arrive for the next tick. A tick lasts as long as the slowest
    device's work.

    Nothing is checked here: :func:`tessera.graph.pipelining.schedule_legality.check`
    says whether a table can be executed.

    Args:
      name: The name of the schedule.
      stages: Devices along the pipeline, S.
      microbatches: Parts of the batch, M.
      chunks: Virtual stages on each device, v.
      splits_backward: Whether B leaves the gradients of weights to W.
      cells: ``cells[tick][device]``, the work of that device in that tick.
      placement: "loop" has virtual stage k on device k % S: after the last device
        follows the first. "v", of two chunks, turns at the last device, which has
        stages S-1 and S, and ends at the first (Qi et al. 2024, arXiv 2405.15362).

    Example:
      >>> from tessera.graph.pipelining import schedule
      >>> print(schedule("1f1b", stages=2, microbatches=3).as_text())
      1f1b: 2 stages, 3 microbatches, 5 ticks, idle 25.0 %
      tick     | 0  | 1     | 2     | 3     | 4
      device 0 | F0 | F1    | F2 B0 | B1    | B2
      device 1 |    | F0 B0 | F1 B1 | F2 B2 |
    """

    name: str
    stages: int
    microbatches: int
    chunks: int
    splits_backward: bool
    cells: Cells
    placement: Placement = "loop"

    @property
    def ticks(self) -> int:
        """Steps of the loop that executes the table."""
        return len(self.cells)

    @property
    def virtual_stages(self) -> int:
        """How many parts the layers are split into: stages x chunks."""
        return self.stages * self.chunks

    def stage_of(self, device: Any, chunk: Any) -> Any:
        """The virtual stage that is a chunk of a device; integers or arrays of them."""
        return stage_of(self.placement, self.stages, device, chunk)

    def device_of(self, stage: Any) -> Any:
        """The device that has a virtual stage, or an array of them."""
        if self.placement == "v":
            return np.minimum(stage, 2 * self.stages - 1 - stage)
        return stage % self.stages

    @property
    def stage_numbers(self) -> np.ndarray:
        """Integers [chunks, stages]: the virtual stage of each chunk of each device."""
        chunk = np.arange(self.chunks)[:, None]
        return self.stage_of(np.arange(self.stages), chunk)

    def placed(self) -> Iterator[tuple[int, int, Op]]:
        """Every op with its tick and its device."""
        for tick, row in enumerate(self.cells):
            for device, cell in enumerate(row):
                for op in cell:
                    yield tick, device, op

    def table(self, kind: Kind) -> np.ndarray:
        """The microbatch and chunk that each device works on, as the loop reads them.

        Returns:
          int32 [ticks, stages, 2] of (microbatch, chunk), -1 and -1 where a device does
          nothing of this kind. Read-only.
        """
        return self._tables[kind]

    @cached_property
    def _tables(self) -> dict[Kind, np.ndarray]:
        shape = (self.ticks, self.stages, 2)
        tables = {kind: np.full(shape, -1, np.int32) for kind in KINDS}
        for tick, device, op in self.placed():
            tables[op.kind][tick, device] = op.microbatch, op.chunk
        for table in tables.values():
            table.flags.writeable = False
        return tables

    @property
    def phases(self) -> tuple[tuple[tuple[Kind, ...], slice], ...]:
        """Kinds of work and their ticks: forwards by themselves, or all together.

        Example:
          >>> from tessera.graph.pipelining import schedule
          >>> schedule("gpipe", stages=2, microbatches=3).phases
          ((('F',), slice(0, 4, None)), (('B',), slice(4, 8, None)))
          >>> schedule("1f1b", stages=2, microbatches=3).phases
          ((('F', 'B'), slice(0, 5, None)),)
        """
        ticks: dict[Kind, list[int]] = {op.kind: [] for *_, op in self.placed()}
        for tick, _, op in self.placed():
            ticks[op.kind].append(tick)
        kinds = tuple(kind for kind in KINDS if kind in ticks)
        turn = max(ticks["F"]) + 1
        if any(min(ticks[kind]) < turn for kind in kinds[1:]):
            return ((kinds, slice(0, self.ticks)),)
        return (kinds[:1], slice(0, turn)), (kinds[1:], slice(turn, self.ticks))

    def busy_ticks(self, kind: Kind, ticks: slice, *, recomputes: bool) -> int:
        """In how many of some ticks a device does work of a kind.

        Args:
          kind: The kind.
          ticks: Which ticks.
          recomputes: Whether a B runs its stage again. Then an F of the last virtual
            stage, for whose result none waits, does nothing.
        """
        micro, chunk = np.moveaxis(self.table(kind)[ticks], -1, 0)
        stage = self.stage_of(np.arange(self.stages), chunk)
        is_empty = recomputes & (kind == "F") & (stage == self.virtual_stages - 1)
        return int(((micro >= 0) & ~is_empty).any(axis=1).sum())

    def costs(
        self, forward: float = 1.0, backward: float | None = None, weight: float = 1.0
    ) -> np.ndarray:
        """The working time of each device in each tick.

        Args:
          forward: Time that a whole device's layers take for an F, in any unit.
          backward: The same for a B; when not given, 2, or 1 where W is split from it.
            A backward that runs the forward again costs 1 more.
          weight: The same for a W.

        Returns:
          float64 [ticks, stages], in that unit. A chunk takes its share of the device.
        """
        if backward is None:
            backward = 1.0 if self.splits_backward else 2.0
        prices: dict[Kind, float] = {"F": forward, "B": backward, "W": weight}
        each = [(self.table(kind)[..., 0] >= 0) * prices[kind] for kind in KINDS]
        return np.sum(each, axis=0) / self.chunks

    def idle_fraction(
        self, forward: float = 1.0, backward: float | None = None, weight: float = 1.0
    ) -> float:
        """The share of the devices' time in which they wait, from the table.

        Args:
          forward: As in :meth:`costs`, and so are the others.
          backward: See above.
          weight: See above.

        Returns:
          1 - work / (stages x time), where the time is the sum over ticks of the
          longest work of a device in it.
        """
        costs = self.costs(forward, backward, weight)
        return float(1.0 - costs.sum() / (self.stages * costs.max(axis=1).sum()))

    def summary(self) -> str:
        """One line: sizes, ticks and the idle share at the default costs."""
        sizes = [f"{self.stages} stages"]
        sizes += [f"{self.chunks} chunks"] if self.chunks > 1 else []
        sizes += [f"{self.microbatches} microbatches", f"{self.ticks} ticks"]
        idle = 100 * self.idle_fraction()
        return f"{self.name}: {', '.join(sizes)}, idle {idle:.1f} %"

    def as_text(self) -> str:
        """A row per device, a column per tick; chunks as letters, as in ``F0a``."""
        columns = [["tick", *(f"device {device}" for device in range(self.stages))]]
        for tick, row in enumerate(self.cells):
            cells = [" ".join(map(self._label, cell)) for cell in row]
            columns.append([str(tick), *cells])
        widths = [max(map(len, column)) for column in columns]
        rows = [
            " | ".join(map(str.ljust, row, widths)).rstrip()
            for row in zip(*columns, strict=True)
        ]
        return "\n".join([self.summary(), *rows])

    def _label(self, op: Op) -> str:
        chunk = ascii_lowercase[op.chunk : op.chunk + 1] or f".{op.chunk}"
        return f"{op.kind}{op.microbatch}{chunk if self.chunks > 1 else ''}"
