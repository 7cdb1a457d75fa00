# SPDX-License-Identifier: Apache-2.0
"""``Event``: an operation, a transfer or a loop on the time axis of a timeline."""

from dataclasses import dataclass
from typing import Final

COMPUTE: Final = "compute"
LOOP: Final = "loop"


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of a timeline.

    Attributes:
      name: XLA's name of the instruction, which profilers show.
      op_name: JAX's name stack of the operation, such as ``jit(step)/dot_general``.
      source: ``file:line`` of the user's line, or ``""``.
      kind: ``matmul``, ``attention``, ``other``; XLA's name of a collective; ``copy``;
        ``computation`` beside the main stream; or ``loop``.
      axes: The mesh axes of a collective.
      stream: ``compute``, or what the transfer occupies, such as ``NVLink``.
      start: Seconds since the beginning of the step.
      duration: Seconds on the axis. All iterations of a loop are drawn as one that
        takes as long as all together.
      each: Seconds of one execution.
      times: How often it is executed; where a conditional skips it, on average.
      exposed: Seconds of all executions in which the device waits for it.
      hidden: Seconds of all executions of a transfer in which the device computes.
    """

    name: str
    op_name: str
    source: str
    kind: str
    axes: tuple[str, ...]
    stream: str
    start: float
    duration: float
    each: float
    times: float
    exposed: float = 0.0
    hidden: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of all executions."""
        return self.each * self.times
