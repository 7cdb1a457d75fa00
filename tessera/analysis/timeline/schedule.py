# SPDX-License-Identifier: Apache-2.0
"""Reads the schedule of a compiled program as a sequence of timed steps.

The order of a scheduled module's text is that in which a device executes it. Loops
remain loops. A conditional has each of its branches as often as their name scopes say,
and where they say nothing the one that takes longest.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, TypeAlias

from tessera.analysis.asynchronous_fusions import Part, channel, part_of
from tessera.analysis.collective import Collective
from tessera.analysis.collective_reader import CollectiveReader
from tessera.analysis.dataflow import Dataflow
from tessera.analysis.hlo import Computation, Instruction, Module
from tessera.analysis.hlo_walk import Node, Path
from tessera.analysis.timeline.operation_times import operation_time
from tessera.mesh import Mesh
from tessera.targets.link_routes import UsedLink
from tessera.targets.link_times import collective_seconds
from tessera.targets.machine import HOST_BANDWIDTH
from tessera.targets.target import Target
from tessera.tracing.scope import FALLBACK, TAKEN

# Transfers that are no collectives: copies between memories, and computations that run
# beside the main stream.
COPY: Final = "copy"
HOST: Final = "host"
COMPUTATION: Final = "computation"

_HOST_MEMORY: Final = ":S(5)"  # in a layout
_COPIES: Final = ("copy-start", "slice-start", "dynamic-slice-start")
_SHARE: Final = re.compile(rf"/branch_\d+_fun/{TAKEN}(at_most_)?(\d+)_of_(\d+)")


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


@dataclass(frozen=True)
class Transfer:
    """What runs beside the stream of computation, or blocks it.

    Attributes:
      instruction: What starts it.
      kind: XLA's name of a collective, ``copy`` or ``computation``.
      seconds: How long it takes once its links are free.
      links: What it cannot share with another transfer at the same time.
      row: What the ledger has of it, where it is a collective.
    """

    instruction: Instruction
    kind: str
    seconds: float
    links: frozenset[UsedLink] = field(repr=False)
    row: Collective | None = None

    @property
    def name(self) -> str:
        """XLA's name of what starts it."""
        return self.instruction.name


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
    """Waits for the end of the transfer of that key, if one is on its way.

    Attributes:
      key: That of its ``Start``.
      is_synchronous: Whether one operation is both.
    """

    key: str
    is_synchronous: bool = False


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


@dataclass(frozen=True)
class Branch:
    """A conditional.

    Attributes:
      instruction: The ``conditional``.
      parts: The steps of each branch, with the share of executions that take it.
      is_known: Whether the shares are known; else they are the most that can be, or the
        longest branch has all.
    """

    instruction: Instruction
    parts: tuple[tuple[float, tuple["Step", ...]], ...]
    is_known: bool


Step: TypeAlias = Compute | Start | Wait | Loop | Branch


def serial_seconds(steps: Iterable[Step]) -> float:
    """Seconds of steps if nothing overlapped."""
    spent = 0.0
    for step in steps:
        match step:
            case Compute():
                spent += step.seconds
            case Start():
                spent += step.transfer.seconds
            case Loop():
                count = 1 if step.count is None else step.count
                spent += count * serial_seconds(step.body)
            case Branch():
                spent += sum(share * serial_seconds(body) for share, body in step.parts)
    return spent


class TimedSteps:
    """The steps of a program.

    Args:
      module: The program, scheduled.
      mesh: The mesh that it was compiled for, in the order of its devices.
      target: The machine that its devices are of.
    """

    def __init__(self, module: Module, mesh: Mesh, target: Target) -> None:
        self._module, self._target = module, target
        flow = Dataflow(module)
        self._reader = CollectiveReader(flow, mesh)
        self._rows = {
            (node.computation.name, node.instruction.name): row
            for node in flow.nodes
            if (row := self._reader.row(node))
        }

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """Those of the entry computation."""
        return self._steps(self._module.computations[self._module.entry], ())

    @cached_property
    def unknown_collectives(self) -> int:
        """Collectives of an unknown kind or with unknown groups; they take no time."""
        return sum(row.is_unknown for _, row in self._reader.rows())

    def _steps(self, computation: Computation, outer: Path) -> tuple[Step, ...]:
        return tuple(
            step
            for instruction in computation.instructions.values()
            for step in self._step(Node((*outer, (computation, instruction))))
        )

    def _transfer(
        self,
        computation: Computation,
        instruction: Instruction,
        caller: Instruction | None = None,
    ) -> Transfer | None:
        """The transfer of a collective; None of anything else, and where it is unknown.

        Args:
          computation: The one that contains the instruction.
          instruction: Any instruction.
          caller: What runs the computation, where that is one operation.
        """
        row = self._rows.get((computation.name, instruction.name))
        if row is None or row.is_unknown:
            return None
        place, machine = self._reader.places.place(instruction), self._target.machine
        seconds = max(
            collective_seconds(machine, row.kind, row.nbytes, where)
            for where in place.spans
        )
        return Transfer(caller or instruction, row.kind, seconds, place.links, row)

    def _step(self, node: Node) -> Iterator[Step]:
        instruction, computation = node.instruction, node.computation
        opcode = instruction.opcode
        if opcode == "while":
            body = self._steps(self._module.body(instruction), node.path)
            yield Loop(instruction, body, self._reader.counts.count(node))
        elif opcode == "conditional":
            yield self._branch(node)
        elif opcode == "call":
            for callee in self._module.callees(instruction):
                yield from self._steps(callee, node.path)
        elif opcode == "fusion":
            yield from self._fusion(computation, instruction)
        elif opcode.endswith("-done"):
            yield Wait(_end_key(computation, instruction))
        elif opcode in _COPIES:
            yield Start(instruction.name, self._copy(instruction))
        elif (computation.name, instruction.name) in self._rows:
            yield from self._collective(computation, instruction)
        elif opcode.endswith("-start"):
            yield from self._asynchronous(node)
        elif not opcode.endswith("-update"):
            yield from self._compute(computation, instruction)

    def _branch(self, node: Node) -> Branch:
        callees = self._module.callees(node.instruction)
        branches = [self._steps(callee, node.path) for callee in callees]
        declared = _declared_shares(node.instruction, callees)
        shares, is_known = declared if declared else ([], False)
        is_fallback = [*map(_is_fallback, callees)]
        if not shares and len(callees) == 2 and sum(is_fallback) == 1:
            shares = [float(not each) for each in is_fallback]
        elif not shares:
            seconds = [serial_seconds(branch) for branch in branches]
            longest = seconds.index(max(seconds))
            shares = [float(number == longest) for number in range(len(branches))]
        parts = zip(shares, branches, strict=True)
        taken = tuple((share, branch) for share, branch in parts if share)
        return Branch(node.instruction, taken, is_known)

    def _collective(
        self, computation: Computation, instruction: Instruction
    ) -> Iterator[Step]:
        if transfer := self._transfer(computation, instruction):
            yield Start(instruction.name, transfer)
            if instruction.opcode == transfer.kind:
                yield Wait(instruction.name, is_synchronous=True)

    def _compute(
        self, computation: Computation, instruction: Instruction
    ) -> Iterator[Step]:
        kind, seconds = operation_time(
            self._module, self._target, computation, instruction
        )
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
        part, key = part_of(callee, collective), channel(collective)
        if part in (Part.BETWEEN, Part.WHOLE):
            yield from self._compute(computation, instruction)
        if part is Part.END:
            yield Wait(key)
        elif part is not Part.BETWEEN and (
            transfer := self._transfer(callee, collective, instruction)
        ):
            if part is Part.START:
                yield Start(key, transfer)
            else:
                yield Start(instruction.name, transfer)
                yield Wait(instruction.name, is_synchronous=True)

    def _collective_in(
        self, instruction: Instruction
    ) -> tuple[Computation, Instruction] | None:
        """The first collective that an operation contains."""
        for callee in self._module.callees(instruction):
            for each in callee.instructions.values():
                if self._transfer(callee, each) is not None:
                    return callee, each
                if each.opcode == "fusion" and (found := self._collective_in(each)):
                    return found
        return None

    def _asynchronous(self, node: Node) -> Iterator[Step]:
        """A start of what a computation of its own describes."""
        instruction = node.instruction
        if inner := self._collective_in(instruction):
            transfer = self._transfer(*inner, instruction)
            assert transfer is not None
            yield Start(instruction.name, transfer)
            return
        seconds = sum(
            serial_seconds(self._steps(callee, node.path))
            for callee in self._module.callees(instruction)
        )
        if seconds:
            links = frozenset({COMPUTATION})
            transfer = Transfer(instruction, COMPUTATION, seconds, links)
            yield Start(instruction.name, transfer)

    def _copy(self, instruction: Instruction) -> Transfer:
        """A copy between memories: what it copies is the second part of its result."""
        nbytes = sum(shape.nbytes for shape in instruction.elements[1])
        rate, links = self._target.machine.memory_rate, COPY
        if _HOST_MEMORY in instruction.result:
            rate, links = HOST_BANDWIDTH, HOST
        return Transfer(instruction, COPY, nbytes / rate, frozenset({links}))


def _end_key(computation: Computation, instruction: Instruction) -> str:
    """The name of what an operation is the end of."""
    started = next(iter(computation.sources(instruction)), None)
    while started is not None and started.opcode.endswith("-update"):
        started = next(iter(computation.sources(started)), None)
    return started.name if started is not None else ""


def _is_fallback(branch: Computation) -> bool:
    """Whether data have to demand a branch; see ``scope.FALLBACK``."""
    return any(FALLBACK in each.op_name for each in branch.instructions.values())


def _declared_shares(
    conditional: Instruction, branches: Sequence[Computation]
) -> tuple[list[float], bool] | None:
    """How often each branch is taken, and whether exactly so; see ``scope.TAKEN``.

    A branch that says nothing is taken wherever no other is.
    """
    shares: list[float | None] = []
    is_exact = True
    for branch in branches:
        names = (each.op_name for each in branch.instructions.values())
        inside = (name.removeprefix(conditional.op_name) for name in names)
        found = next(filter(None, map(_SHARE.match, inside)), None)
        shares.append(int(found[2]) / int(found[3]) if found else None)
        is_exact &= not (found and found[1])
    if shares.count(None) != 1:
        return None
    rest = 1.0 - sum(filter(None, shares))
    return [rest if share is None else share for share in shares], is_exact
