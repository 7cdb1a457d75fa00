# SPDX-License-Identifier: Apache-2.0
"""``Lockstep``: how long the ticks of a pipeline's schedule take."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from tessera.graph.pipelining import Kind, schedule

# Each device does its work of one kind in ticks that follow each other.
IN_RUNS: Final = ("gpipe", "1f1b", "interleaved", "zero_bubble")


@dataclass(frozen=True, eq=False)
class Lockstep:
    """The ticks of a schedule, in which all stages wait for the slowest.

    Attributes:
      works: For each kind of work bool ``[runs, stages]``: who does it.
      lengths: int ``[runs]``: ticks that follow each other with the same work.
      stages: Devices along the pipeline.
      chunks: Virtual stages on each device.
      end: The device of the last virtual stage.
    """

    works: dict[Kind, np.ndarray]
    lengths: np.ndarray
    stages: int
    chunks: int
    end: int = -1

    @classmethod
    def of(cls, name: str, stages: int, microbatches: int, chunks: int) -> "Lockstep":
        """The ticks of a schedule with a name, whose sizes are legal.

        Example:
          >>> Lockstep.of("1f1b", 2, 3, 1).ticks
          5
        """
        if name not in IN_RUNS:
            depth = chunks if chunks > 1 else None
            table = schedule(name, stages, microbatches, depth)
            kinds: tuple[Kind, ...] = ("F", "B", "W")[: 2 + table.splits_backward]
            works = {kind: table.table(kind)[..., 0] >= 0 for kind in kinds}
            end = int(table.device_of(table.virtual_stages - 1))
            return cls(works, np.ones(table.ticks, int), stages, chunks, end)
        # A table of thousands of ticks takes long, and few of its ticks differ.
        device, count = np.arange(stages), microbatches * chunks
        wait = stages * chunks - 1 if name != "gpipe" else microbatches + stages - 1
        begins: dict[Kind, np.ndarray] = {"F": device, "B": wait + device[::-1]}
        if name == "zero_bubble":
            begins["W"] = np.full(stages, 2 * (stages - 1))
        first = np.concatenate([*begins.values()])
        turns = np.unique(np.concatenate([first, first + count]))
        ticks = {kind: turns[:-1, None] - each for kind, each in begins.items()}
        works = {kind: (at >= 0) & (at < count) for kind, at in ticks.items()}
        return cls(works, np.diff(turns), stages, chunks)

    @property
    def ticks(self) -> int:
        """Steps of the loop that executes the schedule."""
        return int(self.lengths.sum())

    def seconds(
        self, forward: np.ndarray, backward: np.ndarray, *, recomputes: bool
    ) -> float:
        """Of all ticks.

        Args:
          forward: Seconds of the forward pass of each stage.
          backward: The same for the backward pass, of which W has the half where it is
            apart.
          recomputes: Whether W then begins with another forward pass.
        """
        prices: dict[Kind, np.ndarray] = {"F": forward, "B": backward}
        if "W" in self.works:
            prices["B"] = prices["W"] = (backward + recomputes * forward) / 2
        costs = [works * prices[kind] for kind, works in self.works.items()]
        longest = np.sum(costs, axis=0).max(axis=1)
        return float(np.repeat(longest, self.lengths).sum()) / self.chunks


def is_simple(name: str, chunks: int, stages: int, microbatches: int) -> bool:
    """Whether a schedule is surely legal, and its table needs not be made to know it.

    Example:
      >>> is_simple("interleaved", 2, 4, 8), is_simple("interleaved", 2, 4, 6)
      (True, False)
    """
    if name == "interleaved":
        return microbatches % stages == 0
    return name in IN_RUNS and chunks == 1
