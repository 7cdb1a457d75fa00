# SPDX-License-Identifier: Apache-2.0
"""Walks a compiled program as it runs: what is executed, and how often.

XLA nests computations in loops, branches, fusions and asynchronous wrappers. Here they
are unrolled into one sequence, each instruction with the way that leads to it.
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tessera.analysis.hlo import Computation, Instruction, Module
from tessera.analysis.trip_counts import Path, trip_count

_RUNS_ITS_CALLEES = ("call", "fusion", "async-start", "call-start", "custom-call")


@dataclass(frozen=True, slots=True)
class Execution:
    """An instruction, as reached from the program's entry.

    Attributes:
      path: The (computation, instruction) pairs from the entry down to this one.
      calls: How often one execution of the program runs it; None inside a loop whose
        length is known only at run time.
      conditional: Whether a branch may skip it, so that ``calls`` is the most.
    """

    path: Path
    calls: int | None
    conditional: bool

    @property
    def computation(self) -> Computation:
        """The computation that the instruction stands in."""
        return self.path[-1][0]

    @property
    def instruction(self) -> Instruction:
        """The instruction itself."""
        return self.path[-1][1]


def executions(module: Module) -> Iterator[Execution]:
    """Every instruction that a program executes, in program order, loop bodies once.

    The functions that reductions and collectives apply to pairs of numbers, and loop
    conditions, are not walked.
    """
    root = Execution((), 1, False)
    yield from _inside(module, module.computations[module.entry], root)


def cause(module: Module, execution: Execution) -> Instruction:
    """The instruction that says which line of the program this one comes from.

    XLA makes collectives that carry no source of their own. They exist for what reads
    their result; failing that, they belong to what made their operands, and at last to
    the loop that they stand in.
    """
    for computation, instruction in reversed(execution.path):
        for neighbors in (computation.readers, computation.sources):
            found = _nearest_with_source(module, instruction, neighbors)
            if found is not None:
                return found
    return execution.instruction


def _inside(
    module: Module, computation: Computation, outer: Execution
) -> Iterator[Execution]:
    for instruction in computation.instructions.values():
        path = (*outer.path, (computation, instruction))
        execution = dataclasses.replace(outer, path=path)
        yield execution
        reached = _reached(module, execution)
        for name in _callees(instruction):
            yield from _inside(module, module.computations[name], reached)


def _callees(instruction: Instruction) -> tuple[str, ...]:
    called = instruction.called
    if instruction.opcode == "while":
        return called["body"]
    if instruction.opcode in (*_RUNS_ITS_CALLEES, "conditional"):
        return tuple(name for names in called.values() for name in names)
    # Not the later halves of asynchronous operations: their work is counted already.
    return ()


def _reached(module: Module, execution: Execution) -> Execution:
    """How the computations that an instruction calls are reached."""
    instruction = execution.instruction
    if instruction.opcode == "conditional":
        return dataclasses.replace(execution, conditional=True)
    if instruction.opcode == "while":
        trips = trip_count(module, execution.path)
        outer = execution.calls
        calls = None if trips is None or outer is None else trips * outer
        return dataclasses.replace(execution, calls=calls)
    return execution


def _nearest_with_source(
    module: Module,
    start: Instruction,
    neighbors: Callable[[Instruction], tuple[Instruction, ...]],
) -> Instruction | None:
    """The first instruction with a Python stack, searched breadth first."""
    reached, seen = [start], {start.name}
    for instruction in reached:
        if module.frames(instruction):
            return instruction
        fresh = [each for each in neighbors(instruction) if each.name not in seen]
        seen.update(each.name for each in fresh)
        reached.extend(fresh)
    return None
