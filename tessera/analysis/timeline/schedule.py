# SPDX-License-Identifier: Apache-2.0
"""Reads the schedule of a compiled program as a sequence of timed steps.

The order of a scheduled module's text is that in which a device executes it. Loops
remain loops; of a conditional's branches the one that takes longest is taken.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final, TypeAlias

from tessera.analysis.hlo import Computation, Instruction, Module
from tessera.analysis.hlo_walk import trip_count
from tessera.analysis.timeline.operation_times import OperationTimes
from tessera.analysis.timeline.transfers import (
    COMPUTATION,
    COPY,
    Collectives,
    Transfer,
    channel,
)
from tessera.analysis.timeline.work import call_target
from tessera.mesh import Mesh
from tessera.targets.target import Target

_START, _DONE = "AsyncCollectiveStart", "AsyncCollectiveDone"
_COPIES: Final = ("copy-start", "slice-start", "dynamic-slice-start")


@dataclass(frozen=True, slots=True)
class Compute:
    """An operation on the stream of computation.

    Attributes:
      instruction: The operation.
      kind: ``matmul``, ``attention`` or ``other``.
      seconds: How long it takes.
    """

    instruction: Instruction
    kind: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Start:
    """Begins a transfer as soon as its links are free.

    Attributes:
      key: What ``Wait`` calls it.
      transfer: The transfer.
    """

    key: str
    transfer: Transfer


@dataclass(frozen=True, slots=True)
class Wait:
    """Waits for the end of the transfer of that key, if one is on its way."""

    key: str


@dataclass(frozen=True)
class Loop:
    """A body that runs several times.

    Attributes:
      instruction: The ``while``.
      body: Its steps.
      count: How often it runs; None where that is known only at run time.
    """

    instruction: Instruction
    body: tuple["Step", ...]
    count: int | None

    @cached_property
    def computes_only(self) -> bool:
        """Whether nothing in it is transferred."""
        return all(
            isinstance(step, Compute)
            or (isinstance(step, Loop | Branch) and step.computes_only)
            for step in self.body
        )


@dataclass(frozen=True)
class Branch:
    """The branch of a conditional that takes longest.

    Attributes:
      instruction: The ``conditional``.
      body: The steps of the branch.
    """

    instruction: Instruction
    body: tuple["Step", ...]

    @cached_property
    def computes_only(self) -> bool:
        """Whether nothing in it is transferred."""
        return Loop(self.instruction, self.body, 1).computes_only


Step: TypeAlias = Compute | Start | Wait | Loop | Branch


def serial_seconds(steps: Iterable[Step]) -> float:
    """Seconds of steps if nothing overlapped."""
    return sum(map(_serial, steps))


def _serial(step: Step) -> float:
    match step:
        case Compute():
            return step.seconds
        case Start():
            return step.transfer.seconds
        case Loop():
            count = 1 if step.count is None else step.count
            return count * serial_seconds(step.body)
        case Branch():
            return serial_seconds(step.body)
    return 0.0


class Schedule:
    """The steps of a program.

    Args:
      module: The program, scheduled.
      mesh: The mesh that it was compiled for, in the order of its devices.
      target: The machine that its devices are of.
    """

    def __init__(self, module: Module, mesh: Mesh, target: Target) -> None:
        self._module, self._target = module, target
        self._times = OperationTimes(module, target)
        self._collectives = Collectives(mesh, target)
        self._known: dict[str, tuple[Step, ...]] = {}

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """Those of the entry computation."""
        return self._steps(self._module.computations[self._module.entry])

    def _steps(self, computation: Computation) -> tuple[Step, ...]:
        if computation.name not in self._known:
            self._known[computation.name] = tuple(
                step
                for instruction in computation.instructions.values()
                for step in self._step(computation, instruction)
            )
        return self._known[computation.name]

    def _step(
        self, computation: Computation, instruction: Instruction
    ) -> Iterator[Step]:
        opcode = instruction.opcode
        if opcode == "while":
            body = self._steps(self._module.body(instruction))
            count = trip_count(self._module, instruction, computation)
            yield Loop(instruction, body, count)
        elif opcode == "conditional":
            branches = map(self._steps, self._module.callees(instruction))
            yield Branch(instruction, max(branches, key=serial_seconds))
        elif opcode == "call":
            for callee in self._module.callees(instruction):
                yield from self._steps(callee)
        elif opcode == "fusion":
            yield from self._fusion(computation, instruction)
        elif opcode.endswith("-done"):
            yield Wait(_end_key(computation, instruction))
        elif opcode in _COPIES:
            yield Start(instruction.name, self._copy(computation, instruction))
        elif transfer := self._collectives.transfer(computation, instruction):
            yield Start(instruction.name, transfer)
            if opcode == transfer.kind:
                yield Wait(instruction.name)
        elif opcode.endswith("-start"):
            yield from self._asynchronous(instruction)
        elif not opcode.endswith("-update"):
            yield from self._compute(computation, instruction)

    def _compute(
        self, computation: Computation, instruction: Instruction
    ) -> Iterator[Step]:
        kind, seconds = self._times.time(computation, instruction)
        if seconds:
            yield Compute(instruction, kind, seconds)

    def _fusion(
        self, computation: Computation, instruction: Instruction
    ) -> Iterator[Step]:
        """A fusion may compute, start or end a collective, or be one with its work.

        A TPU passes an asynchronous collective through the fusions that it overlaps
        with: all of them contain it, and only the first and the last stand for it.
        """
        inner = self._collective_in(instruction)
        if inner is None:
            yield from self._compute(computation, instruction)
            return
        callee, collective = inner
        targets = {call_target(each) for each in callee.instructions.values()}
        key = channel(collective)
        if _DONE in targets:
            yield Wait(key)
        elif _START in targets:
            if transfer := self._collectives.transfer(callee, collective, instruction):
                yield Start(key, transfer)
        elif "async_collective_fusion_config" in collective.tail:
            yield from self._compute(computation, instruction)
        else:
            yield from self._compute(computation, instruction)
            if transfer := self._collectives.transfer(callee, collective, instruction):
                yield from (Start(instruction.name, transfer), Wait(instruction.name))

    def _collective_in(
        self, instruction: Instruction
    ) -> tuple[Computation, Instruction] | None:
        """The first collective that an operation contains."""
        for callee in self._module.callees(instruction):
            for each in callee.instructions.values():
                if self._collectives.transfer(callee, each) is not None:
                    return callee, each
                if each.opcode == "fusion" and (found := self._collective_in(each)):
                    return found
        return None

    def _asynchronous(self, instruction: Instruction) -> Iterator[Step]:
        """A start of what a computation of its own describes."""
        if inner := self._collective_in(instruction):
            transfer = self._collectives.transfer(*inner, instruction)
            assert transfer is not None
            yield Start(instruction.name, transfer)
            return
        callees = self._module.callees(instruction)
        seconds = sum(serial_seconds(self._steps(callee)) for callee in callees)
        if seconds:
            links = frozenset({COMPUTATION})
            yield Start(
                instruction.name,
                Transfer(instruction, COMPUTATION, (), 0, seconds, links),
            )

    def _copy(self, computation: Computation, instruction: Instruction) -> Transfer:
        """A copy between memories: what it copies is the second part of its result."""
        nbytes = sum(shape.nbytes for shape in instruction.elements[1])
        machine = self._target.machine
        rate = machine.memory_bandwidth * machine.efficiency["memory"]
        links = frozenset({COPY})
        return Transfer(instruction, COPY, (), nbytes, nbytes / rate, links)


def _end_key(computation: Computation, instruction: Instruction) -> str:
    """The name of what an operation is the end of."""
    started = next(iter(computation.sources(instruction)), None)
    while started is not None and started.opcode.endswith("-update"):
        started = next(iter(computation.sources(started)), None)
    return started.name if started is not None else ""
