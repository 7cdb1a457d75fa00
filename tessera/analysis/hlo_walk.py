# SPDX-License-Identifier: Apache-2.0
"""Lists what a compiled program executes, and how often.

XLA nests computations in loops, branches, fusions and asynchronous wrappers. Here they
are unrolled into one sequence, each instruction with the calls that lead to it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from tessera.analysis.dataflow import CALLS, Node
from tessera.analysis.hlo import Computation, Instruction, Module
from tessera.analysis.trip_counts import trip_count

_CALLS = (*CALLS, "call-start", "custom-call", "conditional")


@dataclass(frozen=True)
class Execution(Node):
    """An instruction, as reached from the program's entry.

    Attributes:
      calls: How often one execution of the program runs it; None inside a loop whose
        length is known only at run time.
      conditional: Whether a branch may skip it, so that ``calls`` is an upper bound.
    """

    calls: int | None = 1
    conditional: bool = False


def executions(module: Module) -> Iterator[Execution]:
    """Every instruction that a program executes, in program order, loop bodies once.

    What an instruction runs comes before it. The functions that reductions and
    collectives apply to pairs of numbers, and loop conditions, are left out.
    """
    yield from _inside(module, module.computations[module.entry], Execution(()))


def cause(module: Module, execution: Execution) -> Instruction:
    """The instruction that says which source line this one comes from.

    XLA makes collectives that have no source of their own. They exist for what reads
    their result; failing that, they belong to what made their operands, and at last to
    the loop that contains them.
    """
    for computation, instruction in reversed(execution.path):
        for neighbors in (computation.readers, computation.sources):
            nearest = _nearest_with_source(module, instruction, neighbors)
            if nearest is not None:
                return nearest
    return execution.instruction


def _inside(
    module: Module, computation: Computation, outer: Execution
) -> Iterator[Execution]:
    for instruction in computation.instructions.values():
        path = (*outer.path, (computation, instruction))
        execution = replace(outer, path=path)
        # The later parts of asynchronous operations run nothing a second time.
        if instruction.opcode == "while":
            loop = _in_loop(module, execution)
            yield from _inside(module, module.body(instruction), loop)
        elif instruction.opcode in _CALLS:
            branch = outer.conditional or instruction.opcode == "conditional"
            for callee in module.callees(instruction):
                yield from _inside(
                    module, callee, replace(execution, conditional=branch)
                )
        yield execution


def _in_loop(module: Module, loop: Execution) -> Execution:
    """How often a loop's body is reached."""
    trips, calls = trip_count(module, loop), loop.calls
    total = None if trips is None or calls is None else trips * calls
    return replace(loop, calls=total)


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
