# SPDX-License-Identifier: Apache-2.0
"""Measures how long a program computed and communicated, from a profiler's trace.

On each device, time in which several operations run counts once, and communication is
hidden while something computes. The figures are of one execution on one device: the
mean over devices and executions.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tessera.analysis.hlo import Module
from tessera.analysis.ledger import Ledger
from tessera.analysis.trace_events import OpEvent

Axes: TypeAlias = tuple[str, ...]

# Their events last as long as everything that they run.
_CONTROL_FLOW = ("while", "conditional", "call", "tuple", "parameter")


@dataclass(frozen=True, slots=True)
class AxesTime:
    """Time of one device in the collectives over one combination of axes.

    Attributes:
      seconds: Time in which any of them ran, waiting for other devices included.
      hidden: The part in which the device computed as well.
      calls: How many ran in one execution.
    """

    seconds: float
    hidden: float
    calls: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured seconds of one execution on one device.

    Attributes:
      executions: How many were measured.
      seconds: Time of one execution on the host.
      compute: Time in which any operation ran that is not a collective.
      communication: Time of collectives, per combination of axes.
      communicating: Time in which any collective ran.
      hidden: The part of ``communicating`` in which the device computed as well.
    """

    executions: int
    seconds: float
    compute: float
    communication: Mapping[Axes, AxesTime]
    communicating: float
    hidden: float

    @property
    def overlap(self) -> float | None:
        """The share of communication that is hidden behind computation."""
        return self.hidden / self.communicating if self.communicating else None

    @property
    def idle(self) -> float:
        """Seconds in which a device waited for the host."""
        busy = self.compute + self.communicating - self.hidden
        return max(0.0, self.seconds - busy)


def measure(
    events: Collection[OpEvent],
    module: Module,
    ledger: Ledger,
    *,
    executions: int,
    seconds: float,
) -> Measured | None:
    """Divide the events of a program into computation and communication.

    Args:
      events: Events of the devices of this process.
      module: The compiled program.
      ledger: Its collectives.
      executions: How often it ran during the trace.
      seconds: Time of one execution on the host.

    Returns:
      The measurement, or None where no event is one of the program's operations.
    """
    axes_of = axes_by_instruction(module, ledger)
    own = [event for event in events if event.op in axes_of]
    devices = {event.device for event in own}
    if not own:
        return None
    share = 1.0 / (len(devices) * executions)
    compute, communicating, hidden = 0.0, 0.0, 0.0
    starts = {row.instruction for row in ledger.rows}
    spent = {axes: [0.0, 0.0, 0] for axes in ledger.by_axis()}
    for device in devices:
        local = [event for event in own if event.device == device]
        computing = [event for event in local if axes_of[event.op] is None]
        sending = [event for event in local if axes_of[event.op] is not None]
        compute += _length(computing)
        communicating += _length(sending)
        hidden += _overlap(sending, computing)
        for axes, sums in spent.items():
            over = [event for event in local if axes_of[event.op] == axes]
            sums[0] += _length(over)
            sums[1] += _overlap(over, computing)
            sums[2] += sum(event.op in starts for event in over)
    return Measured(
        executions=executions,
        seconds=seconds,
        compute=compute * share,
        communication={
            axes: AxesTime(*(each * share for each in sums))
            for axes, sums in spent.items()
        },
        communicating=communicating * share,
        hidden=hidden * share,
    )


def axes_by_instruction(module: Module, ledger: Ledger) -> dict[str, Axes | None]:
    """The axes that each instruction communicates over; None for one that computes."""
    sent = {row.instruction: row.axes for row in ledger.rows}
    axes: dict[str, Axes | None] = {}
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            if instruction.opcode in _CONTROL_FLOW:
                continue
            names = [instruction.name]
            if instruction.opcode.endswith("-done"):  # it reads the start
                names += instruction.operands
            axes[instruction.name] = next((sent[n] for n in names if n in sent), None)
    return axes


def _length(events: Iterable[OpEvent]) -> float:
    """The time in which any of the events ran."""
    total, until = 0.0, float("-inf")
    for start, end in sorted((event.start, event.end) for event in events):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def _overlap(first: Sequence[OpEvent], second: Sequence[OpEvent]) -> float:
    """The time in which events of both ran."""
    both = _length(first) + _length(second) - _length([*first, *second])
    # Traces count picoseconds: less is an error of these sums.
    return max(0.0, round(both, 12))
