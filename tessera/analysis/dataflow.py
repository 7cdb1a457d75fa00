# SPDX-License-Identifier: Apache-2.0
"""Follows values of a compiled program through tuples, loops, branches and calls.

None of these computes anything. ``definitions`` goes back from a value to the
operations that compute it, and ``uses`` forward to those that read it; neither stops
in between.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from tessera.analysis.hlo import Computation, Instruction, Module

# The calls from the entry down to an instruction: each call with the computation that
# contains it, then the instruction itself.
Path = tuple[tuple[Computation, Instruction], ...]

CALLS = ("fusion", "call", "async-start")
_SAME_TUPLE = ("optimization-barrier", "copy", "async-done")
_FORWARDS = ("get-tuple-element", "tuple", "while", "conditional", "parameter")

# The element that stands for what the program returns.
RESULT = -1


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
    def key(self) -> tuple[tuple[tuple[str, str], ...], int | None]:
        """A short value that identifies the node."""
        return tuple((outer.name, each.name) for outer, each in self.path), self.element

    def sibling(self, name: str, element: int | None = None) -> "Node":
        """Another value of the same computation; newer XLA names elements ``x#1``."""
        name, _, index = name.partition("#")
        last = (self.computation, self.computation.instructions[name])
        return Node((*self.path[:-1], last), int(index) if index else element)

    def operands(self) -> list["Node"]:
        """The values that the instruction reads."""
        known = self.computation.instructions
        names = self.instruction.operands
        return [self.sibling(n) for n in names if n.partition("#")[0] in known]

    def caller(self) -> "Node":
        """The instruction that runs this one's computation."""
        return Node(self.path[:-1])

    def inner(self, computation: Computation, instruction: Instruction) -> "Node":
        """The same element of a value in a computation that this instruction runs."""
        return Node((*self.path, (computation, instruction)), self.element)


def follow(
    start: Iterable[Node], step: Callable[[Node], Iterable[Node] | None]
) -> Iterator[Node]:
    """Search from some nodes, and yield those at which the search ends.

    Args:
      start: The first nodes.
      step: The next nodes after one; None ends the search there.
    """
    waiting = list(start)
    seen = {node.key for node in waiting}
    while waiting:
        node = waiting.pop()
        further = step(node)
        if further is None:
            yield node
            continue
        for each in further:
            if each.key not in seen:
                seen.add(each.key)
                waiting.append(each)


class Dataflow:
    """How values pass through the control flow of one module."""

    def __init__(self, module: Module) -> None:
        self._module = module

    def definitions(self, *nodes: Node) -> Iterator[Node]:
        """The operations that compute some values, or inputs of the program."""
        yield from follow(nodes, self.sources)

    def uses(self, node: Node) -> Iterator[Node]:
        """The operations that read a value; with ``RESULT`` where it is returned."""
        yield from follow(self._next(node), self._forwarded)

    # --- backward

    def sources(self, node: Node) -> list[Node] | None:
        """The values that a value is another name of; None where it is computed."""
        instruction, element = node.instruction, node.element
        operands = instruction.operands
        match instruction.opcode:
            case "get-tuple-element":
                return [node.sibling(operands[0], int(instruction.attributes["index"]))]
            case "tuple" if element is not None:
                return [node.sibling(operands[element])]
            case opcode if opcode in _SAME_TUPLE and element is not None:
                return [node.sibling(operands[0], element)]
            case "while" if element is not None or not instruction.is_tuple:
                body = self._module.body(instruction)
                return [node.sibling(operands[0], element), node.inner(body, body.root)]
            case opcode if opcode in CALLS:
                callee = self._module.callees(instruction)[0]
                return [node.inner(callee, callee.root)]
            case "conditional":
                branches = self._module.callees(instruction)
                return [node.inner(branch, branch.root) for branch in branches]
            case "parameter" if len(node.path) > 1:
                return self._arguments(node)
        return None

    def _arguments(self, parameter: Node) -> list[Node] | None:
        """The values that a parameter of a computation stands for."""
        caller, element = parameter.caller(), parameter.element
        operands = caller.instruction.operands
        match caller.instruction.opcode:
            case "while":  # before the loop, and after each iteration
                root = parameter.computation.root
                carried = parameter.sibling(root.name, element)
                return [caller.sibling(operands[0], element), carried]
            case "conditional":
                branches = self._module.callees(caller.instruction)
                names = [branch.name for branch in branches]
                index = 1 + names.index(parameter.computation.name)
                return [caller.sibling(operands[index], element)]
        number = int(parameter.instruction.operands[0])
        if number >= len(operands):
            return None
        return [caller.sibling(operands[number], element)]

    # --- forward

    def _forwarded(self, node: Node) -> list[Node] | None:
        """Where a value goes on to; None where an operation computes with it."""
        opcode = node.instruction.opcode
        if node.element == RESULT or (opcode in _SAME_TUPLE and node.element is None):
            return None
        if opcode in (*_FORWARDS, *CALLS, *_SAME_TUPLE):
            return list(self._next(node))
        return None

    def _next(self, node: Node) -> Iterator[Node]:
        if node.instruction is node.computation.root:
            yield from self._returned(node)
        for reader in node.computation.readers(node.instruction):
            yield from self._received(node, node.sibling(reader.name))

    def _returned(self, node: Node) -> Iterator[Node]:
        """A computation's result, as the instruction that runs the computation."""
        if len(node.path) == 1:
            yield Node(node.path, RESULT)
            return
        caller = node.caller()
        yield replace(caller, element=node.element)
        if caller.instruction.opcode == "while":
            parameter = node.computation.parameters[0]
            yield node.sibling(parameter.name, node.element)

    def _received(self, node: Node, reader: Node) -> Iterator[Node]:
        """A value, as the instruction that reads it forwards it."""
        instruction = reader.instruction
        positions = [
            position
            for position, operand in enumerate(instruction.operands)
            if _refers_to(operand, node)
        ]
        entered: list[tuple[Computation, int]] = []
        match instruction.opcode:
            case "get-tuple-element":
                if node.element in (None, int(instruction.attributes["index"])):
                    yield reader
            case "tuple":
                yield from (replace(reader, element=i) for i in positions)
            case "while":
                entered = [(self._module.body(instruction), 0) for _ in positions]
            case "conditional":
                branches = self._module.callees(instruction)
                entered = [(branches[i - 1], 0) for i in positions if i]
            case opcode if opcode in CALLS:
                callee = self._module.callees(instruction)[0]
                entered = [(callee, position) for position in positions]
            case opcode if opcode in _SAME_TUPLE:
                yield replace(reader, element=node.element)
            case _ if positions:
                yield reader
        for callee, number in entered:
            called = replace(reader, element=node.element)
            yield called.inner(callee, callee.parameters[number])


def _refers_to(operand: str, node: Node) -> bool:
    """Whether an operand is this value; newer XLA writes elements of tuples ``x#1``."""
    name, _, index = operand.partition("#")
    if name != node.instruction.name:
        return False
    return not index or node.element is None or int(index) == node.element
