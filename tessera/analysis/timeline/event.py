# SPDX-License-Identifier: Apache-2.0
"""``Event``: an operation, a transfer or a loop on the time axis of a timeline."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

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


def perfetto(events: Sequence[Event], title: str) -> dict[str, Any]:
    """Events in Chrome's trace format, times in microseconds, a lane for each stream.

    Args:
      events: Of one device.
      title: What they are.

    Source:
      "Trace Event Format", Google, section "Complete Events".
    """
    streams = dict.fromkeys(event.stream for event in events)
    lanes = {stream: number for number, stream in enumerate(streams)}
    entries = [_metadata("process_name", 0, title)]
    entries += [_metadata("thread_name", lane, name) for name, lane in lanes.items()]
    for event in events:
        start = round(event.start * 1e6, 3)
        end = round((event.start + event.duration) * 1e6, 3)
        is_loop = event.kind == LOOP
        entries.append(
            {
                "ph": "X",
                "pid": 0,
                "tid": lanes[event.stream],
                "name": f"{event.name} × {event.times:g}" if is_loop else event.name,
                "cat": event.kind,
                "ts": start,
                "dur": round(end - start, 3),
                "args": {
                    "op": event.op_name,
                    "line": event.source,
                    "axes": "×".join(event.axes),
                    "seconds each": event.each,
                    "times": event.times,
                    "seconds waited for": event.exposed,
                },
            }
        )
    return {"traceEvents": entries, "displayTimeUnit": "ms"}


def _metadata(kind: str, lane: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": 0, "tid": lane, "name": kind, "args": {"name": name}}
