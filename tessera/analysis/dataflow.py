# SPDX-License-Identifier: Apache-2.0
"""Follows values of a compiled program through what only passes them on.

Tuples, loops, branches, fusions and calls compute nothing themselves. ``written`` goes
back from a value to the operation that computes it, ``read`` on to those that use it,
and neither stops at these.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from tessera.analysis.hlo import Computation, Instruction, Module

# What leads from an instruction to the computations that run it, outermost first.
Frames = tuple[tuple[Computation, Instruction], ...]

_RUNS_ONE = ("fusion", "call", "async-start")
_SAME_TUPLE = ("optimization-barrier", "copy", "async-done")
_PASSES = ("get-tuple-element", "tuple", "while", "conditional", "parameter")

# The element that stands for what the program returns.
RESULT = -1


@dataclass(frozen=True)
class Node:
    """One value of a program, at one of the places that it is reached from.

    Attributes:
      frames: Where it stands: as ``Execution.path``, this instruction last.
      element: Which element of a tuple it is; None is the whole.
    """

    frames: Frames
    element: int | None = None

    @property
    def computation(self) -> Computation:
        """The computation that the instruction stands in."""
        return self.frames[-1][0]

    @property
    def instruction(self) -> Instruction:
        """The instruction whose result, or a part of it, this is."""
        return self.frames[-1][1]

    @property
    def key(self) -> tuple[tuple[str, ...], int | None]:
        """What tells two of them apart."""
        return tuple(instruction.name for _, instruction in self.frames), self.element

    def beside(self, name: str, element: int | None = None) -> "Node":
        """Another value of the same computation; newer XLA names elements ``x#1``."""
        name, _, index = name.partition("#")
        instruction = self.computation.instructions[name]
        place = (*self.frames[:-1], (self.computation, instruction))
        return Node(place, int(index) if index else element)

    def outside(self) -> "Node":
        """The instruction that runs this one's computation."""
        return Node(self.frames[:-1])


class Dataflow:
    """The ways that values take through a module."""

    def __init__(self, module: Module) -> None:
        self._module = module

    def written(self, node: Node) -> Iterator[Node]:
        """The operations that a value comes from, or the program's inputs."""
        yield from self._ends([node], self._before)

    def operands(self, node: Node) -> Iterator[Node]:
        """The operations that compute what an operation reads."""
        names = node.instruction.operands
        here = [node.beside(n) for n in names if self._has(node, n)]
        yield from self._ends(here, self._before)

    def read(self, node: Node) -> Iterator[Node]:
        """The operations that use a value; the entry's root where it is a result."""
        yield from self._ends(list(self._after(node) or ()), self._after_passing)

    def _ends(
        self, start: list[Node], step: Callable[[Node], list[Node] | None]
    ) -> Iterator[Node]:
        seen, waiting = {node.key for node in start}, start
        while waiting:
            node = waiting.pop()
            further = step(node)
            if further is None:
                yield node
                continue
            fresh = [each for each in further if each.key not in seen]
            seen.update(each.key for each in fresh)
            waiting.extend(fresh)

    def _has(self, node: Node, name: str) -> bool:
        return name.partition("#")[0] in node.computation.instructions

    def _inside(self, node: Node, name: str) -> tuple[Frames, Computation]:
        return node.frames, self._module.computations[name]

    # --- backwards

    def _before(self, node: Node) -> list[Node] | None:
        """What a value is another name for; None where it is computed."""
        instruction, element = node.instruction, node.element
        match instruction.opcode:
            case "get-tuple-element":
                index = int(instruction.attributes["index"])
                return [node.beside(instruction.operands[0], index)]
            case "tuple" if element is not None:
                return [node.beside(instruction.operands[element])]
            case opcode if opcode in _SAME_TUPLE and element is not None:
                return [node.beside(instruction.operands[0], element)]
            case "while" if element is not None:
                frames, body = self._inside(node, instruction.called["body"][0])
                after = Node((*frames, (body, body.root)), element)
                return [node.beside(instruction.operands[0], element), after]
            case opcode if opcode in _RUNS_ONE:
                names = next(iter(instruction.called.values()))
                frames, inner = self._inside(node, names[0])
                return [Node((*frames, (inner, inner.root)), element)]
            case "conditional":
                return [
                    Node((*node.frames, (branch, branch.root)), element)
                    for branch in self._branches(instruction)
                ]
            case "parameter" if len(node.frames) > 1:
                return self._argument(node)
        return None

    def _argument(self, node: Node) -> list[Node]:
        caller = node.outside()
        operands = caller.instruction.operands
        match caller.instruction.opcode:
            case "while":
                again = Node((*node.frames[:-1], (body := node.computation, body.root)))
                first = caller.beside(operands[0], node.element)
                return [first, replace(again, element=node.element)]
            case "conditional":
                branches = self._branches(caller.instruction)
                place = [b.name for b in branches].index(node.computation.name)
                return [caller.beside(operands[1 + place], node.element)]
        number = int(node.instruction.operands[0])
        return [caller.beside(operands[number], node.element)]

    def _branches(self, instruction: Instruction) -> list[Computation]:
        names = [name for group in instruction.called.values() for name in group]
        return [self._module.computations[name] for name in names]

    # --- forwards

    def _after_passing(self, node: Node) -> list[Node] | None:
        """Where a value goes on to; None where an operation computes with it."""
        opcode = node.instruction.opcode
        whole = node.element is None
        if node.element == RESULT or (opcode in _SAME_TUPLE and whole):
            return None
        if opcode in (*_PASSES, *_RUNS_ONE, *_SAME_TUPLE):
            return list(self._after(node))
        return None

    def _after(self, node: Node) -> Iterator[Node]:
        if node.instruction is node.computation.root:
            if len(node.frames) == 1:
                yield Node(node.frames, RESULT)
            else:
                yield from self._returned(node)
        for reader in node.computation.readers(node.instruction):
            here = node.beside(reader.name)
            yield from self._given(node, here)

    def _returned(self, node: Node) -> Iterator[Node]:
        caller = replace(node.outside(), element=node.element)
        yield caller
        if caller.instruction.opcode == "while":
            body = node.computation
            (start,) = [
                i for i in body.instructions.values() if i.opcode == "parameter"
            ]
            yield Node((*node.frames[:-1], (body, start)), node.element)

    def _given(self, node: Node, reader: Node) -> Iterator[Node]:
        """A value as the instruction that reads it hands it on."""
        instruction = reader.instruction
        places = [
            place
            for place, operand in enumerate(instruction.operands)
            if _names(operand, node)
        ]
        match instruction.opcode:
            case "get-tuple-element":
                if node.element in (None, int(instruction.attributes["index"])):
                    yield reader
            case "tuple":
                yield from (replace(reader, element=place) for place in places)
            case "while":
                yield self._parameter(reader, instruction.called["body"][0], 0, node)
            case "conditional":
                branches = self._branches(instruction)
                for place in places:
                    if place:
                        chosen = branches[place - 1].name
                        yield self._parameter(reader, chosen, 0, node)
            case opcode if opcode in _RUNS_ONE:
                callee = next(iter(instruction.called.values()))[0]
                for place in places:
                    yield self._parameter(reader, callee, place, node)
            case opcode if opcode in _SAME_TUPLE:
                yield replace(reader, element=node.element)
            case _ if places:
                yield reader

    def _parameter(self, reader: Node, name: str, number: int, node: Node) -> Node:
        frames, inner = self._inside(reader, name)
        (found,) = [
            i
            for i in inner.instructions.values()
            if i.opcode == "parameter" and int(i.operands[0]) == number
        ]
        return Node((*frames, (inner, found)), node.element)


def _names(operand: str, node: Node) -> bool:
    """Whether an operand is this value; newer XLA writes elements of tuples ``x#1``."""
    name, _, index = operand.partition("#")
    if name != node.instruction.name:
        return False
    return not index or node.element is None or int(index) == node.element
