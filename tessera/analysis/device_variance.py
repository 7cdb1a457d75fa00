# SPDX-License-Identifier: Apache-2.0
"""Over which mesh axes each value of a compiled program differs from device to device.

An input differs over the axes that its layout splits it over; what is computed from
values differs where they do; an all-reduce or an all-gather makes a value the same
along its axes. So the text of a program tells what its devices compute in parts and
what all of them compute alike.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from tessera.analysis import replica_groups
from tessera.analysis.hlo import Computation, Instruction, Module

Axes: TypeAlias = frozenset[str]
# One entry for each element of the outermost tuple; an array has one.
Value: TypeAlias = tuple[Axes, ...]

NOWHERE: Axes = frozenset()

_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")


class Varying:
    """The axes over which the values of one program differ.

    Attributes:
      knows_inputs: Whether there is an entry for each input of the program.

    Args:
      module: The compiled program.
      mesh_shape: Size of each axis of the mesh that it was compiled for.
      inputs: The axes that each input of the program is split over; without any, they
        are taken to be whole on every device.
      by_rank: Whether what is computed from a device's number differs: the part that
        it cuts of an array that is whole on every device.
    """

    def __init__(
        self,
        module: Module,
        mesh_shape: Mapping[str, int],
        inputs: Sequence[Axes] = (),
        *,
        by_rank: bool = True,
    ) -> None:
        self._module, self._shape = module, mesh_shape
        self._of_rank = frozenset(mesh_shape) if by_rank else NOWHERE
        self._found: dict[tuple[str, str], Value] = {}
        entry = module.computations[module.entry]
        count = sum(i.opcode == "parameter" for i in entry.instructions.values())
        self.knows_inputs = len(inputs) == count
        known = inputs if self.knows_inputs else [NOWHERE] * count
        self._run(entry, [(axes,) for axes in known])

    def over(self, computation: Computation, instruction: Instruction) -> Axes:
        """The axes over which any array of an instruction's result differs."""
        return _union(self._found.get((computation.name, instruction.name), ()))

    def _run(self, computation: Computation, arguments: Sequence[Value]) -> Value:
        values: dict[str, Value] = {}
        for instruction in computation.instructions.values():
            value = self._value(instruction, values, arguments)
            place = computation.name, instruction.name
            # A computation that is called from several places has the union of all.
            self._found[place] = value = _joined(self._found.get(place, value), value)
            values[instruction.name] = value
        return values[computation.root.name]

    def _value(
        self,
        instruction: Instruction,
        values: Mapping[str, Value],
        arguments: Sequence[Value],
    ) -> Value:
        operands = [_read(name, values) for name in instruction.operands]
        everything = _union(axes for operand in operands for axes in operand)
        count = max(1, len(instruction.elements))
        match instruction.opcode:
            case "parameter":
                return arguments[int(instruction.operands[0])]
            case "partition-id" | "replica-id":
                return (self._of_rank,)
            case "tuple":
                return tuple(map(_union, operands)) or (NOWHERE,)
            case "get-tuple-element":
                index = int(instruction.attributes["index"])
                whole = operands[0]
                return (whole[index] if index < len(whole) else everything,)
            case "while":
                return self._loop(instruction, operands[0])
            case "conditional":
                return self._branches(instruction, operands)
            case "fusion" | "call" | "async-start":
                name = next(iter(instruction.called.values()))[0]
                result = self._run(self._module.computations[name], operands)
                return result if len(result) == count else (_union(result),) * count
            case opcode if opcode.removesuffix("-start") in _COLLECTIVES:
                return self._communicated(instruction, operands, count)
        same = len(operands) == 1 and len(operands[0]) == count
        return operands[0] if same else (everything,) * count

    def _communicated(
        self, instruction: Instruction, operands: Sequence[Value], count: int
    ) -> Value:
        axes = self._whole_axes(instruction)
        if "to-all" in instruction.opcode or "scatter" in instruction.opcode:
            return (_union(map(_union, operands)) | axes,) * count
        if len(operands) == count:  # several arrays that XLA sends together
            return tuple(_union(operand) - axes for operand in operands)
        return (_union(map(_union, operands)) - axes,) * count

    def _loop(self, instruction: Instruction, state: Value) -> Value:
        body = self._module.computations[instruction.called["body"][0]]
        while (after := _joined(state, self._run(body, [state]))) != state:
            state = after
        return state

    def _branches(self, instruction: Instruction, operands: Sequence[Value]) -> Value:
        names = [name for group in instruction.called.values() for name in group]
        chosen = _union(operands[0])
        results = [
            self._run(self._module.computations[name], [operand])
            for name, operand in zip(names, operands[1:], strict=True)
        ]
        joined = results[0]
        for result in results[1:]:
            joined = _joined(joined, result)
        return tuple(axes | chosen for axes in joined)

    def _whole_axes(self, instruction: Instruction) -> Axes:
        """The axes that a collective runs over from end to end."""
        size = math.prod(self._shape.values())
        text = instruction.attributes.get("replica_groups", "{}")
        groups = replica_groups.parse(text, size)
        axes = replica_groups.axes_of(groups, self._shape)
        held = math.prod(self._shape.get(axis, 1) for axis in axes)
        return frozenset(axes) if len(groups[0]) == held else NOWHERE


def _read(operand: str, values: Mapping[str, Value]) -> Value:
    name, _, index = operand.partition("#")
    value = values.get(name, (NOWHERE,))
    return (value[int(index)],) if index and int(index) < len(value) else value


def _union(axes: Iterable[Axes]) -> Axes:
    return NOWHERE.union(*axes)


def _joined(first: Value, second: Value) -> Value:
    if len(first) != len(second):
        return (_union((*first, *second)),) * len(first)
    return tuple(a | b for a, b in zip(first, second, strict=True))
