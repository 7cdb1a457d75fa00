# SPDX-License-Identifier: Apache-2.0
"""``Prediction``: what the planner expects of a layout, before and after compiling."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prediction:
    """One training step in a layout: where its time goes, and its memory.

    Attributes:
      compute: Seconds of matmuls, attention and memory traffic on one device.
      exposed: Seconds of communication that nothing hides.
      bubble: Seconds in which stages of a pipeline wait for each other.
      overhead: Seconds of launching operations and steps.
      memory_bytes: The most memory of one device at any time.
      flops: Model FLOPs of the step, all devices together, without recomputation.
      compiled: Whether the target's compiler gave the memory and the communication;
        else all of it is estimated from shapes.
    """

    compute: float
    exposed: float
    bubble: float
    overhead: float
    memory_bytes: int
    flops: float
    compiled: bool = False

    @property
    def seconds(self) -> float:
        """Of one step."""
        return self.compute + self.exposed + self.bubble + self.overhead
