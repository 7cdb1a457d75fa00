# SPDX-License-Identifier: Apache-2.0
"""How often the body of a compiled loop runs.

A ``lax.scan`` becomes a ``while`` that counts. XLA usually notes the count; where it
does not, it is read off the loop itself: where its counter starts, what is added in the
body, and what the condition compares it with.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from tessera.analysis.hlo import Computation, Instruction, Module

_NOTED = re.compile(r'"known_trip_count":\s*\{\s*"n":\s*"?(\d+)')
_LITERAL = re.compile(r"-?\d+$")
_PASS_ON = ("copy", "bitcast", "convert", "reshape")


@dataclass(frozen=True, slots=True)
class _Counter:
    """An element of the loop's state, plus a constant."""

    element: int
    offset: int = 0


_Value: TypeAlias = int | _Counter | None
Path: TypeAlias = tuple[tuple[Computation, Instruction], ...]


def trip_count(module: Module, path: Path) -> int | None:
    """How often a loop's body runs each time the loop is reached.

    Args:
      module: The compiled program.
      path: The (computation, instruction) pairs that lead from the entry to the loop,
        whose ``while`` instruction is the last.

    Returns:
      The count, or None when it depends on values that are known only at run time.
    """
    loop = path[-1][1]
    if noted := _NOTED.search(loop.attributes.get("backend_config", "")):
        return int(noted[1])
    compared = _comparison(module, module.computations[loop.called["condition"][0]])
    body = module.computations[loop.called["body"][0]]
    if compared is None or body.root.opcode != "tuple":
        return None
    element, limit, direction = compared
    start = _start(module, path, element)
    after = _value(module, body, body.root.operands[element], {})
    if start is None or not isinstance(after, _Counter) or after.element != element:
        return None
    return _steps(start, after.offset, limit, direction)


def _start(module: Module, path: Path, element: int) -> int | None:
    """The constant that an element of a loop's state begins with."""
    scope, loop = path[-1]
    name = loop.operands[0]
    # XLA on CPU moves small loops into functions that take the state as it is.
    for outer, call in reversed(path[:-1]):
        if scope.instructions[name].opcode != "parameter" or call.opcode != "call":
            break
        scope, name = outer, call.operands[int(scope.instructions[name].operands[0])]
    state = scope.instructions[name]
    if state.opcode != "tuple":
        return None
    start = _value(module, scope, state.operands[element], {})
    return start if isinstance(start, int) else None


def _steps(start: int, step: int, limit: int, direction: str) -> int | None:
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


def _comparison(module: Module, condition: Computation) -> tuple[int, int, str] | None:
    """The state element, the constant and the direction that a condition compares."""
    root, scope = condition.root, condition
    bound: Mapping[int, _Value] = {}
    while root.opcode in ("fusion", "call"):
        inner = _callee(module, root)
        bound = _arguments(module, scope, root, bound)
        root, scope = inner.root, inner
    if root.opcode != "compare":
        return None
    left, right = (_value(module, scope, name, bound) for name in root.operands)
    direction = root.attributes["direction"]
    if isinstance(left, int) and isinstance(right, _Counter):
        mirrored = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}
        left, right, direction = right, left, mirrored.get(direction, direction)
    if not isinstance(left, _Counter) or not isinstance(right, int):
        return None
    return left.element, right - left.offset, direction


def _value(
    module: Module, scope: Computation, name: str, bound: Mapping[int, _Value]
) -> _Value:
    """A scalar as a constant, or as an element of the loop's state plus a constant.

    Args:
      module: The compiled program.
      scope: The computation in which the scalar has its name.
      name: The instruction that computes it.
      bound: What the parameters of ``scope`` stand for, where it is called from.
    """
    instruction = scope.instructions.get(name)
    if instruction is None:
        return None
    operands = instruction.operands
    match instruction.opcode:
        case "constant":
            return int(operands[0]) if _LITERAL.match(operands[0]) else None
        case "parameter":
            return bound.get(int(operands[0]))
        case "get-tuple-element":
            source = scope.instructions.get(operands[0])
            if source is not None and source.opcode == "parameter":
                return _Counter(int(instruction.attributes["index"]))
            return None
        case opcode if opcode in _PASS_ON:
            return _value(module, scope, operands[0], bound)
        case "add" | "subtract":
            left, right = (_value(module, scope, each, bound) for each in operands)
            return _sum(left, right, -1 if instruction.opcode == "subtract" else 1)
        case "fusion" | "call":
            inner = _callee(module, instruction)
            arguments = _arguments(module, scope, instruction, bound)
            return _value(module, inner, inner.root.name, arguments)
    return None


def _sum(left: _Value, right: _Value, sign: int) -> _Value:
    if isinstance(left, int) and isinstance(right, int):
        return left + sign * right
    if isinstance(left, _Counter) and isinstance(right, int):
        return _Counter(left.element, left.offset + sign * right)
    if isinstance(left, int) and isinstance(right, _Counter) and sign > 0:
        return _Counter(right.element, left + right.offset)
    return None


def _callee(module: Module, instruction: Instruction) -> Computation:
    called = instruction.called
    return module.computations[(called.get("calls") or called["to_apply"])[0]]


def _arguments(
    module: Module,
    scope: Computation,
    instruction: Instruction,
    bound: Mapping[int, _Value],
) -> Mapping[int, _Value]:
    return {
        position: _value(module, scope, name, bound)
        for position, name in enumerate(instruction.operands)
    }
