# SPDX-License-Identifier: Apache-2.0
"""Lists what a compiled program executes.

XLA nests computations in loops, branches, fusions and asynchronous wrappers. Here they
are unrolled into one sequence, each instruction with the calls that lead to it.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from tessera.analysis.hlo import Computation, Instruction, Module

# The calls from the entry down to an instruction: each call with the computation that
# contains it, then the instruction itself.
Path: TypeAlias = tuple[tuple[Computation, Instruction], ...]
Names: TypeAlias = tuple[tuple[str, str], ...]

# Instructions whose result is that of the computation they run.
CALLS = ("fusion", "call", "async-start")
_RUNS = (*CALLS, "call-start", "custom-call", "conditional")
# XLA records how often a loop runs that counts up to a constant, as of ``lax.scan``.
_TRIP_COUNT = re.compile(r'"known_trip_count":\s*\{\s*"n":\s*"?(\d+)')


@dataclass(frozen=True)
class Node:
    """One value of a program, as reached by one sequence of calls.

    Attributes:
      path: The (computation, instruction) pairs from the entry down to this one.
      element: Index of the element of a tuple; None is the whole value.
    """

    path: Path
    element: int | None = None

    @property
    def computation(self) -> Computation:
        """The computation that contains the instruction."""
        return self.path[-1][0]

    @property
    def instruction(self) -> Instruction:
        """The instruction whose result, or an element of it, this is."""
        return self.path[-1][1]

    @property
    def is_conditional(self) -> bool:
        """Whether a branch may skip it."""
        return any(outer.opcode == "conditional" for _, outer in self.path[:-1])

    @property
    def names(self) -> Names:
        """The names along the path, which identify the instruction."""
        return tuple((outer.name, each.name) for outer, each in self.path)

    @property
    def key(self) -> tuple[Names, int | None]:
        """A short value that identifies the node."""
        return self.names, self.element

    def sibling(self, name: str, element: int | None = None) -> "Node":
        """Another value of the same computation."""
        last = (self.computation, self.computation.instructions[name])
        return Node((*self.path[:-1], last), element)

    def operands(self) -> list["Node"]:
        """The values that the instruction reads."""
        sources = self.computation.sources(self.instruction)
        return [self.sibling(source.name) for source in sources]

    def caller(self) -> "Node":
        """The instruction that runs this one's computation."""
        return Node(self.path[:-1])

    def inner(self, computation: Computation, instruction: Instruction) -> "Node":
        """The same element of a value in a computation that this instruction runs."""
        return Node((*self.path, (computation, instruction)), self.element)


def executions(module: Module) -> Iterator[Node]:
    """Every instruction that a program executes, in program order, loop bodies once.

    What an instruction runs comes before it. The functions that reductions and
    collectives apply to pairs of numbers, and loop conditions, are left out.
    """
    yield from _inside(module, module.computations[module.entry], ())


def trip_count(loop: Instruction) -> int | None:
    """How often a ``while`` runs its body, if XLA records it."""
    match = _TRIP_COUNT.search(loop.attributes.get("backend_config", ""))
    return int(match[1]) if match else None


def cause(module: Module, node: Node) -> Instruction:
    """The instruction that says which source line this one comes from.

    XLA makes collectives that have no source of their own. They exist for what reads
    their result; failing that, they belong to what made their operands, and at last to
    the loop that contains them.
    """
    for computation, instruction in reversed(node.path):
        for neighbors in (computation.readers, computation.sources):
            nearest = _nearest_with_source(module, instruction, neighbors)
            if nearest is not None:
                return nearest
    return node.instruction


def _inside(module: Module, computation: Computation, outer: Path) -> Iterator[Node]:
    for instruction in computation.instructions.values():
        path = (*outer, (computation, instruction))
        callees: list[Computation] = []
        # The later parts of asynchronous operations run nothing a second time.
        if instruction.opcode == "while":
            callees = [module.body(instruction)]
        elif instruction.opcode in _RUNS:
            callees = module.callees(instruction)
        for callee in callees:
            yield from _inside(module, callee, path)
        yield Node(path)


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
