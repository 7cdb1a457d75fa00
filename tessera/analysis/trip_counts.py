# SPDX-License-Identifier: Apache-2.0
"""Counts how often the body of a compiled loop runs, and what is inside it.

A ``lax.scan`` becomes a ``while`` that counts. XLA usually records the count. Where it
does not, it follows from the loop itself: where the counter starts, what the body adds
to it, and what the condition compares it with.
"""

import math
import re
from typing import NamedTuple

from tessera.analysis.dataflow import Dataflow
from tessera.analysis.hlo_walk import Node

_RECORDED = re.compile(r'"known_trip_count":\s*\{\s*"n":\s*"?(\d+)')
_LITERAL = re.compile(r"-?\d+$")
_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}


class _Scalar(NamedTuple):
    """An integer: an element of the loop's state, if any, plus a constant."""

    element: int | None
    offset: int

    def plus(self, other: "_Scalar", sign: int) -> "_Scalar | None":
        if other.element is not None and (self.element is not None or sign < 0):
            return None
        element = self.element if other.element is None else other.element
        return _Scalar(element, self.offset + sign * other.offset)


def calls(flow: Dataflow, node: Node) -> int | None:
    """How often one execution of the program runs an instruction.

    None inside a loop whose length is known only at run time.
    """
    paths = [node.path[: depth + 1] for depth in range(len(node.path) - 1)]
    loops = [Node(path) for path in paths if path[-1][1].opcode == "while"]
    counts = [trip_count(flow, loop) for loop in loops]
    known = [count for count in counts if count is not None]
    return math.prod(known) if len(known) == len(counts) else None


def trip_count(flow: Dataflow, loop: Node) -> int | None:
    """How often a loop's body runs each time the loop is reached.

    Args:
      flow: How values pass through the compiled program.
      loop: Its ``while`` instruction.

    Returns:
      The count, or None when it depends on values that are known only at run time.
    """
    instruction = loop.instruction
    if recorded := _RECORDED.search(instruction.attributes.get("backend_config", "")):
        return int(recorded[1])
    compared = _comparison(flow, loop)
    if compared is None:
        return None
    element, limit, direction = compared
    body = flow.module.body(instruction)
    state = Node(loop.path, element)
    after = _scalar(flow, state.inner(body, body.root), loop)
    start = _scalar(flow, loop.sibling(instruction.operands[0], element), loop)
    if start is None or start.element is not None:
        return None
    if after is None or after.element != element:
        return None
    return _iterations(start.offset, after.offset, limit, direction)


def _iterations(start: int, step: int, limit: int, direction: str) -> int | None:
    """Length of ``start, start + step, ...`` while it compares with the limit."""
    if not step:
        return None
    if direction == "NE":
        count, rest = divmod(limit - start, step)
        return count if not rest and count >= 0 else None
    upward = direction in ("LT", "LE")
    if upward != (step > 0) or direction == "EQ":
        return None
    beyond = {"LT": limit, "LE": limit + 1, "GT": limit, "GE": limit - 1}[direction]
    return max(0, -(-(beyond - start) // step))


def _comparison(flow: Dataflow, loop: Node) -> tuple[int, int, str] | None:
    """The state element, the constant and the direction that a condition compares."""
    condition = flow.module.computations[loop.instruction.called["condition"][0]]
    (root, *others) = flow.definitions(loop.inner(condition, condition.root))
    if others or root.instruction.opcode != "compare":
        return None
    left, right = (_scalar(flow, operand, loop) for operand in root.operands())
    direction = root.instruction.attributes["direction"]
    if left is not None and left.element is None:
        left, right, direction = right, left, _MIRRORED.get(direction, direction)
    if left is None or right is None:
        return None
    if left.element is None or right.element is not None:
        return None
    return left.element, right.offset - left.offset, direction


def _scalar(flow: Dataflow, node: Node, loop: Node) -> _Scalar | None:
    """An integer of the program, as far as the text says what it is.

    Args:
      flow: How values pass through the program.
      node: The value.
      loop: The loop whose state an element may be of.
    """
    instruction = node.instruction
    in_loop = len(node.path) > 1 and node.path[-2][1] is loop.instruction
    if instruction.opcode == "parameter" and in_loop:
        return None if node.element is None else _Scalar(node.element, 0)
    sources = flow.sources(node)
    if sources is not None:
        return _scalar(flow, sources[0], loop) if len(sources) == 1 else None
    operands = node.operands()
    match instruction.opcode:
        case "constant":
            literal = instruction.operands[0]
            return _Scalar(None, int(literal)) if _LITERAL.match(literal) else None
        case "copy" | "bitcast" | "convert" | "reshape" if operands:
            return _scalar(flow, operands[0], loop)
        case "add" | "subtract" if len(operands) == 2:
            left, right = (_scalar(flow, operand, loop) for operand in operands)
            if left is not None and right is not None:
                return left.plus(right, -1 if instruction.opcode == "subtract" else 1)
    return None
