# SPDX-License-Identifier: Apache-2.0
"""Counts how often a compiled program runs what it contains.

XLA records the length of a loop on CPUs and GPUs. On TPUs it does not: there the length
of one that counts in steps up to a constant, as ``lax.scan`` does, is read from the
condition. That of any other is unknown.
"""

import math
from typing import Final

from tessera.analysis.dataflow import Dataflow, follow
from tessera.analysis.hlo_walk import Names, Node, trip_count

_COPIES: Final = ("copy", "copy-start", "copy-done", "bitcast")


class LoopCounts:
    """How often each loop of a program runs its body.

    Args:
      flow: How values pass through the program.
    """

    def __init__(self, flow: Dataflow) -> None:
        self._flow = flow
        self._counts: dict[Names, int | None] = {}

    def calls(self, node: Node) -> int | None:
        """How often one execution of the program runs an instruction.

        None inside a loop whose length is known only at run time.
        """
        outer = [Node(node.path[:depth]) for depth in range(1, len(node.path))]
        loops = [each for each in outer if each.instruction.opcode == "while"]
        counts = [self.count(loop) for loop in loops]
        known = [count for count in counts if count is not None]
        return math.prod(known) if len(known) == len(loops) else None

    def count(self, loop: Node) -> int | None:
        """How often a ``while`` runs its body; None where that is unknown."""
        if loop.names not in self._counts:
            recorded = trip_count(loop.instruction)
            counted = self._counted(loop) if recorded is None else recorded
            self._counts[loop.names] = counted
        return self._counts[loop.names]

    def _counted(self, loop: Node) -> int | None:
        """The length of a loop that runs while a counter is less than a constant."""
        module = self._flow.module
        condition = module.computations[loop.instruction.called["condition"][0]]
        compare = self._origin(Node((*loop.path, (condition, condition.root))))
        if compare.instruction.opcode != "compare":
            return None
        counter, limit = compare.operands()
        direction = compare.instruction.attributes["direction"]
        if direction == "GT":
            counter, limit = limit, counter
        elif direction != "LT":
            return None
        counter, end = self._origin(counter), self._constant(limit)
        if counter.instruction.opcode != "parameter" or counter.element is None:
            return None
        begin = loop.sibling(loop.instruction.operands[0], counter.element)
        start, step = self._constant(begin), self._step(loop, counter.element)
        if start is None or end is None or step is None or step < 1:
            return None
        return max(0, -(-(end - start) // step))

    def _step(self, loop: Node, element: int) -> int | None:
        """What every iteration of a loop adds to an element that it carries."""
        body = self._flow.module.body(loop.instruction)
        before = Node((*loop.path, (body, body.parameters[0])), element)
        after = self._origin(Node((*loop.path, (body, body.root)), element))
        if after.instruction.opcode != "add":
            return None
        first, second = after.operands()
        if self._origin(second).key == before.key:
            first, second = second, first
        return self._constant(second) if self._origin(first).key == before.key else None

    def _origin(self, node: Node) -> Node:
        """What a value is a copy of, however it is passed on."""
        while (sources := self._copied(node)) and len(sources) == 1:
            (node,) = sources
        return node

    def _constant(self, node: Node) -> int | None:
        """The integer that a value always is, if it is one."""
        found = {
            origin.instruction.operands[0]
            if origin.instruction.opcode == "constant"
            else ""
            for origin in follow([node], self._copied)
        }
        text = found.pop() if len(found) == 1 else ""
        return int(text) if text.lstrip("-").isdecimal() else None

    def _copied(self, node: Node) -> list[Node] | None:
        if node.instruction.opcode in _COPIES and node.element is None:
            return node.operands()
        return self._flow.sources(node)
