# SPDX-License-Identifier: Apache-2.0
"""Follows a value of a compiled program back to what it is a copy of."""

from typing import Final, TypeAlias

from tessera.analysis.hlo import Computation, Instruction, Module

# Where an element is in nested tuples.
Index: TypeAlias = tuple[int, ...]

SAME: Final = ("optimization-barrier", "copy-done", "copy-start", "copy")
"""Operations whose result is their operand."""


class Origins:
    """Follows values back through what does not change them.

    Args:
      module: The program.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self._fixed: dict[tuple[str, int], int | None] = {}

    def fixed(self, loop: Instruction, number: int) -> int | None:
        """The element with whose first value every iteration begins; or None.

        It is the element itself where the loop does not change it. A compiler that
        fetches an operand ahead copies it from another element in each iteration; the
        first iteration then begins with a value of its own.
        """
        key = loop.name, number
        if key not in self._fixed:
            self._fixed[key] = None
            self._fixed[key] = self._find_fixed(loop, number)
        return self._fixed[key]

    def _find_fixed(self, loop: Instruction, number: int) -> int | None:
        body = self._module.body(loop)
        name, index = self._origin(body, body.root, (number,))
        if name != body.parameters[0].name or len(index) != 1:
            return None
        source = index[0]
        return source if source in (number, self.fixed(loop, source)) else None

    def _origin(
        self, computation: Computation, instruction: Instruction, index: Index
    ) -> tuple[str, Index]:
        """The name and element of what a value is a copy of."""
        while True:
            opcode, operands = instruction.opcode, instruction.operands
            if opcode == "get-tuple-element":
                index = (int(instruction.attributes["index"]), *index)
                name = operands[0]
            elif opcode == "tuple" and index and index[0] < len(operands):
                name, index = operands[index[0]], index[1:]
            elif opcode in SAME:
                name = operands[0]
            elif opcode == "while" and index:
                number = self.fixed(instruction, index[0])
                if number is None:
                    return instruction.name, index
                name, index = operands[0], (number, *index[1:])
            else:
                return instruction.name, index
            instruction = computation.instructions[name]
