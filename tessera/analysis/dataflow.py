# SPDX-License-Identifier: Apache-2.0
"""Follows values of a compiled program through tuples, loops, branches and calls.

None of these computes anything. ``definitions`` goes back from a value to the
operations that compute it, and ``uses`` forward to those that read it; neither stops
in between.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cached_property

from tessera.analysis.hlo import Module
from tessera.analysis.hlo_walk import CALLS, Names, Node, executions

_SAME_TUPLE = ("optimization-barrier", "copy", "async-done")

# The element that stands for what the program returns.
RESULT = -1


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
    """How values pass through the control flow of one module.

    Attributes:
      module: The compiled program.
    """

    def __init__(self, module: Module) -> None:
        self.module = module

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """Every instruction that the program executes, in program order."""
        return tuple(executions(self.module))

    @cached_property
    def values(self) -> tuple[Node, ...]:
        """Every value of the program: of a tuple, each element by itself."""
        return tuple(
            replace(node, element=element)
            for node in self.nodes
            for element in self._elements(node)
        )

    def definitions(self, *nodes: Node) -> Iterator[Node]:
        """The operations that compute some values, or inputs of the program."""
        yield from follow(nodes, self.sources)

    def uses(self, node: Node) -> Iterator[Node]:
        """The operations that read a value; with ``RESULT`` where it is returned."""

        def after(user: Node) -> list[Node] | None:
            is_end = user.element == RESULT or self.sources(user) is None
            return None if is_end else self._next(user)

        yield from follow(self._next(node), after)

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
                body = self.module.body(instruction)
                return [node.sibling(operands[0], element), node.inner(body, body.root)]
            case opcode if opcode in (*CALLS, "conditional"):
                callees = self.module.callees(instruction)
                return [node.inner(callee, callee.root) for callee in callees]
            case "parameter" if len(node.path) > 1:
                return self._arguments(node)
        return None

    def _arguments(self, parameter: Node) -> list[Node] | None:
        """The values that a parameter of a computation stands for."""
        caller, element = parameter.caller(), parameter.element
        operands = caller.instruction.operands
        match caller.instruction.opcode:
            case "while":  # before the loop, and after each iteration
                body = self.module.body(caller.instruction)
                carried = Node((*caller.path, (body, body.root)), element)
                return [caller.sibling(operands[0], element), carried]
            case "conditional":
                branches = self.module.callees(caller.instruction)
                return [
                    caller.sibling(operand, element)
                    for operand, branch in zip(operands[1:], branches, strict=True)
                    if branch is parameter.computation
                ]
        number = int(parameter.instruction.operands[0])
        if number >= len(operands):
            return None
        return [caller.sibling(operands[number], element)]

    def _elements(self, node: Node) -> Iterable[int | None]:
        instruction = node.instruction
        if instruction.opcode in CALLS:
            instruction = self.module.callees(instruction)[0].root
        return range(len(instruction.elements)) if instruction.is_tuple else [None]

    def _next(self, node: Node) -> list[Node]:
        """The values that are another name of one, and the operations that read it."""
        return [
            user
            for element, user in self._users.get(node.names, ())
            if None in (element, node.element) or element == node.element
        ]

    @cached_property
    def _users(self) -> dict[Names, list[tuple[int | None, Node]]]:
        """For each instruction, the elements of it that are read, and what reads them.

        What enters a loop is read by the parameter of its body: the loop's result is
        what the body returns.
        """
        users: dict[Names, list[tuple[int | None, Node]]] = defaultdict(list)
        for value in self.values:
            sources = self.sources(value)
            if sources is None:
                # An operation reads its operands once for all elements of its result.
                sources = list[Node]() if value.element else value.operands()
                value = Node(value.path)
            elif value.instruction.opcode == "while":
                sources = sources[1:]
            for source in sources:
                users[source.names].append((source.element, value))
        entry = self.module.computations[self.module.entry]
        result = Node(((entry, entry.root),), RESULT)
        users[result.names].append((None, result))
        return users
