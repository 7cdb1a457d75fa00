# SPDX-License-Identifier: Apache-2.0
"""How long a program computed and communicated, from the events of a trace.

On each device the times of its operations are laid over each other: what several do at
once counts once, and what communicates while something computes is hidden. The figures
are of one execution on one device, the mean over devices and executions.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from tessera.analysis.hlo import Module
from tessera.analysis.ledger import Ledger
from tessera.analysis.trace_events import OpEvent

Axes: TypeAlias = tuple[str, ...]
Span: TypeAlias = tuple[float, float]

# Their events last as long as those of all that they run.
_CONTROL_FLOW = ("while", "conditional", "call", "tuple", "parameter")


@dataclass(frozen=True, slots=True)
class AxesTime:
    """What one device spent on the collectives over one combination of axes.

    Attributes:
      seconds: In which any of them ran, waiting for other devices included.
      hidden: Seconds of these in which the device computed as well.
      calls: How many ran in one execution.
    """

    seconds: float
    hidden: float
    calls: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of one execution on one device, measured.

    Attributes:
      executions: How many were measured.
      seconds: That one took, as the host saw it.
      compute: In which any operation ran that is no collective.
      communication: Of collectives, per combination of axes.
      communicating: In which any collective ran.
      hidden: Of ``communicating``, in which the device computed as well.
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
        """Seconds in which a device had nothing to do: the host was not ready."""
        busy = self.compute + self.communicating - self.hidden
        return max(0.0, self.seconds - busy)

    def as_json(self) -> dict[str, Any]:
        """The figures, in seconds, as plain data."""
        return {
            **asdict(self),
            "communication": [
                {"axes": list(axes), **asdict(time)}
                for axes, time in self.communication.items()
            ],
            "overlap": self.overlap,
            "idle": self.idle,
        }


def measure(
    events: Collection[OpEvent],
    module: Module,
    ledger: Ledger,
    *,
    executions: int,
    seconds: float,
) -> Measured | None:
    """Tell computing from communicating in the events of a program.

    Args:
      events: Of the program, on the devices of this process.
      module: The compiled program.
      ledger: Its collectives.
      executions: How often it ran while the trace did.
      seconds: That one execution took, as the host saw it.

    Returns:
      The measurement, or None where no event is one of the program's operations.
    """
    kinds = _kinds(module, ledger)
    known = [event for event in events if event.op in kinds]
    devices = {event.device for event in known}
    if not known:
        return None
    share = 1.0 / (len(devices) * executions)
    compute, communicating, hidden = 0.0, 0.0, 0.0
    begun = {row.instruction for row in ledger.rows}
    spent = {axes: [0.0, 0.0, 0] for axes in ledger.by_axis()}
    for device in devices:
        mine = [event for event in known if event.device == device]
        computing = _union(e for e in mine if kinds[e.op] is None)
        sending = _union(e for e in mine if kinds[e.op] is not None)
        compute += _length(computing)
        communicating += _length(sending)
        hidden += _common(sending, computing)
        for axes, sums in spent.items():
            over = [event for event in mine if kinds[event.op] == axes]
            spans = _union(over)
            sums[0] += _length(spans)
            sums[1] += _common(spans, computing)
            sums[2] += sum(event.op in begun for event in over)
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


def _kinds(module: Module, ledger: Ledger) -> dict[str, Axes | None]:
    """The axes that each instruction communicates over; None for one that computes."""
    sent = {row.instruction: row.axes for row in ledger.rows}
    kinds: dict[str, Axes | None] = {}
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            if instruction.opcode in _CONTROL_FLOW:
                continue
            # The second half of an asynchronous one reads the first.
            halves = (instruction.name, *instruction.operands)
            is_done = instruction.opcode.endswith("-done")
            names = halves if is_done else halves[:1]
            kinds[instruction.name] = next((sent[n] for n in names if n in sent), None)
    return kinds


def _union(events: Iterable[OpEvent]) -> list[Span]:
    """The time in which any of the events ran, as spans in order."""
    spans: list[Span] = []
    for start, end in sorted((event.start, event.end) for event in events):
        if spans and start <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(end, spans[-1][1])
        else:
            spans.append((start, end))
    return spans


def _length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)


def _common(first: Sequence[Span], second: Sequence[Span]) -> float:
    """The time that two sequences of spans have in common."""
    total, place = 0.0, 0
    for start, end in first:
        while place < len(second) and second[place][1] <= start:
            place += 1
        for other in second[place:]:
            if other[0] >= end:
                break
            total += min(end, other[1]) - max(start, other[0])
    return total
