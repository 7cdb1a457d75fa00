# SPDX-License-Identifier: Apache-2.0
"""``Timeline``: what one step does on a device, and when, as predicted."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from tessera.analysis.source_lines import short
from tessera.analysis.tables import aligned, format_seconds

_COLUMNS: Final = (
    *("operation", "kind", "stream", "times", "each", "total"),
    *("of the step", "waited for", "line", "op"),
)
_SHOWN: Final = 20
_LONGEST: Final = 40
_WAITS: Final = 4


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation or a transfer of a step, and how long it takes.

    Attributes:
      name: XLA's name of the instruction, which profilers show.
      op_name: JAX's name stack of the operation, such as ``jit(step)/dot_general``.
      source: ``file:line`` of the user's line, or ``""``.
      kind: ``matmul``, ``attention``, ``other``; XLA's name of a collective; ``copy``;
        or ``computation`` beside the main stream.
      axes: The mesh axes of a collective.
      stream: ``compute``, or what the transfer occupies, such as ``NVLink``.
      each: Seconds of one execution.
      times: How often it is executed; where a conditional skips it, on average.
      exposed: Seconds of all executions in which the device waits for it.
      reason: Why it does, as the schedule says: ``synchronous``, it is one operation;
        ``links busy``, it begins late, behind others; ``needed at once``, hardly any
        computation stands between its start and its end; ``too little beside it``,
        what stands there takes less time.
    """

    name: str
    op_name: str
    source: str
    kind: str
    axes: tuple[str, ...]
    stream: str
    each: float
    times: float
    exposed: float = 0.0
    reason: str = ""

    @property
    def total(self) -> float:
        """Seconds of all executions."""
        return self.each * self.times


@dataclass(frozen=True, slots=True)
class Communication:
    """Collectives over one combination of mesh axes.

    Attributes:
      seconds: In which they run.
      exposed: In which the device computes nothing and waits for them.
      hidden: In which the device computes beside them.
    """

    seconds: float
    exposed: float
    hidden: float


@dataclass(frozen=True, repr=False)
class Timeline:
    """One step on one device, as predicted; nothing was measured.

    Attributes:
      target: The machine, such as ``h100:2x8``.
      rule: What the predicted times are from.
      seconds: Of the step.
      computation: Seconds of operations on the stream of computation, by kind:
        ``matmul``, ``attention`` and ``other``.
      communication: Collectives, by the mesh axes that they run over.
      conditional: Seconds of computation in branches that are chosen at run time: each
        is taken as often as it can be, or else the longest of its conditional always.
      unknown_loops: Loops whose length is known only at run time; each counts once.
      unknown_collectives: Collectives whose kind or groups Tessera does not know; none
        of their time is in the figures.
      operations: What is executed.
    """

    target: str
    rule: str
    seconds: float
    computation: Mapping[str, float]
    communication: Mapping[tuple[str, ...], Communication]
    conditional: float
    unknown_loops: int
    unknown_collectives: int
    operations: tuple[Operation, ...]

    @property
    def compute(self) -> float:
        """Seconds in which the device computes."""
        return sum(self.computation.values())

    @property
    def exposed(self) -> float:
        """Seconds in which the device waits for collectives."""
        return sum(each.exposed for each in self.communication.values())

    @property
    def overlapped(self) -> float:
        """Seconds of collectives while the device computes."""
        return sum(each.hidden for each in self.communication.values())

    @property
    def overlap(self) -> float | None:
        """The overlapped share of the collectives' time; None without collectives."""
        spent = sum(each.seconds for each in self.communication.values())
        return self.overlapped / spent if spent else None

    @property
    def waits(self) -> list[Operation]:
        """The collectives that the device waits for, the longest wait first."""
        exposed = [each for each in self.operations if each.axes and each.exposed]
        return sorted(exposed, key=lambda each: -each.exposed)

    @property
    def idle(self) -> float:
        """Seconds of starting the step, and of waiting for copies between memories."""
        return max(0.0, self.seconds - self.compute - self.exposed)

    def as_text(self) -> str:
        """The costliest operations as a table, and the totals."""
        costs = sorted(self.operations, key=lambda each: -each.total)
        rows = [self._cells(each) for each in costs[:_SHOWN]]
        lines = [self.title, aligned(_COLUMNS, rows, right=_COLUMNS[3:8])]
        if rest := costs[_SHOWN:]:
            spent = format_seconds(sum(each.total for each in rest))
            lines.append(f"… {len(rest)} more operations and transfers of {spent}")
        return "\n".join([*lines, "", self.summary()])

    def summary(self) -> str:
        """The totals, one line each."""
        return "\n".join(self._summary())

    @property
    def title(self) -> str:
        """What the figures are."""
        return (
            f"timeline of one step on a device of {self.target}, predicted: {self.rule}"
        )

    __str__ = as_text
    __repr__ = as_text

    def _cells(self, operation: Operation) -> list[str]:
        return [
            operation.name
            if len(operation.name) <= _LONGEST
            else f"{operation.name[:39]}…",
            operation.kind,
            operation.stream,
            f"{operation.times:g}",
            format_seconds(operation.each),
            format_seconds(operation.total),
            _share(operation.total, self.seconds),
            format_seconds(operation.exposed) if operation.exposed else "",
            short(operation.source) or "?",
            _last(operation.op_name),
        ]

    def _summary(self) -> Iterator[str]:
        whole = self.seconds
        kinds = ", ".join(
            f"{kind} {format_seconds(spent)}"
            for kind, spent in self.computation.items()
            if spent
        )
        yield f"predicted step on {self.target}: {format_seconds(whole)}"
        yield (
            f"  computation            {format_seconds(self.compute)} "
            f"({_share(self.compute, whole)}): {kinds or 'none'}"
        )
        exposed = ", ".join(
            f"{'×'.join(axes)} {format_seconds(each.exposed)} of "
            f"{format_seconds(each.seconds)}"
            for axes, each in self.communication.items()
        )
        yield (
            f"  exposed communication  {format_seconds(self.exposed)} "
            f"({_share(self.exposed, whole)}): {exposed or 'none'}"
        )
        yield from map(_wait, self.waits[:_WAITS])
        overlapped = f"  overlapped             {format_seconds(self.overlapped)}"
        if self.overlap is not None:
            overlapped += f" ({100 * self.overlap:.1f} % of all communication)"
        yield overlapped
        yield f"  idle                   {format_seconds(self.idle)}"
        if self.conditional > whole / 1000:
            yield (
                f"  {format_seconds(self.conditional)} of the computation is in "
                "branches that are chosen at run time, each counted as often as it "
                "can be taken"
            )
        if self.unknown_loops:
            yield f"  {self.unknown_loops} loops of unknown length count once"
        if self.unknown_collectives:
            yield (
                f"  unknown: {self.unknown_collectives} collectives, of a kind or in "
                "groups that Tessera does not know, are not counted"
            )


def _wait(operation: Operation) -> str:
    words = [operation.kind, "×".join(operation.axes), _last(operation.op_name)]
    text = " ".join(filter(None, words))
    return f"    {format_seconds(operation.exposed)} {text}: {operation.reason}"


def _last(op_name: str) -> str:
    return op_name if len(op_name) <= _LONGEST else f"…{op_name[1 - _LONGEST :]}"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else ""
