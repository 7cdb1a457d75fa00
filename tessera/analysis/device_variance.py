# SPDX-License-Identifier: Apache-2.0
"""Over which mesh axes each value of a compiled program differs between devices.

An input differs over the axes that its layout splits it over. A result differs where
its operands do; an all-reduce or an all-gather makes it equal along the collective's
axes. So the text of a program shows what its devices compute in parts and what all of
them compute alike.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from tessera.analysis import replica_groups
from tessera.analysis.collective_operands import groups_of
from tessera.analysis.dataflow import Dataflow
from tessera.analysis.hlo import Instruction
from tessera.analysis.hlo_walk import Node

Axes: TypeAlias = frozenset[str]

NONE: Axes = frozenset()

_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")


class DeviceVariance:
    """The axes over which the values of one program differ.

    Attributes:
      has_input_layouts: Whether there is an entry for each input of the program.

    Args:
      flow: How values pass through the compiled program.
      mesh_shape: Size of each axis of the mesh that it was compiled for.
      inputs: The axes that each input of the program is split over; without any, they
        are taken to be replicated.
      by_rank: Whether values computed from a device's number differ: the block that it
        slices out of an array that is replicated.
    """

    def __init__(
        self,
        flow: Dataflow,
        mesh_shape: Mapping[str, int],
        inputs: Sequence[Axes] = (),
        *,
        by_rank: bool = True,
    ) -> None:
        self._flow, self._shape = flow, mesh_shape
        self._rank_axes = frozenset(mesh_shape) if by_rank else NONE
        entry = flow.module.computations[flow.module.entry]
        count = len(entry.parameters)
        self.has_input_layouts = len(inputs) == count
        self._inputs = inputs if self.has_input_layouts else [NONE] * count
        # By computation and instruction; then by element, or None for an array.
        self._axes: dict[tuple[str, str], dict[int | None, Axes]] = defaultdict(dict)
        self._solve()

    def over(self, node: Node) -> Axes:
        """The axes over which a value, or any array of a tuple, differs."""
        axes = self._axes[node.computation.name, node.instruction.name]
        return axes[node.element] if node.element in axes else _union(axes.values())

    def _solve(self) -> None:
        """Propagate axes until nothing changes: a loop's state may take several turns.

        A computation that is called from several places has the union over all.
        """
        changed = True
        while changed:
            changed = False
            for value in self._flow.values:
                axes = self._axes[value.computation.name, value.instruction.name]
                before = axes.get(value.element)
                axes[value.element] = self._transfer(value) | (before or NONE)
                changed |= axes[value.element] != before

    def _transfer(self, node: Node) -> Axes:
        """The axes of a value, from those of the values that it is computed from."""
        instruction, sources = node.instruction, self._flow.sources(node)
        if sources is not None:
            if instruction.opcode == "conditional":  # it differs with the choice, too
                sources.append(node.sibling(instruction.operands[0]))
            return _union(map(self.over, sources))
        match instruction.opcode:
            case "parameter" if len(node.path) == 1:
                return self._inputs[int(instruction.operands[0])]
            case "partition-id" | "replica-id":
                return self._rank_axes
        operands, count = node.operands(), len(instruction.elements)
        if instruction.opcode.removesuffix("-start") in _COLLECTIVES:
            axes = self._whole_axes(instruction)
            if "to-all" in instruction.opcode or "scatter" in instruction.opcode:
                return _union(map(self.over, operands)) | axes
            if node.element is not None and len(operands) == count:
                operands = [operands[node.element]]  # several arrays sent together
            return _union(map(self.over, operands)) - axes
        if len(operands) == 1 and operands[0].element is None:
            (operand,) = operands
            if len(operand.instruction.elements) == count:
                return self.over(replace(operand, element=node.element))
        return _union(map(self.over, operands))

    def _whole_axes(self, instruction: Instruction) -> Axes:
        """The axes that a collective spans completely."""
        try:
            groups = groups_of(instruction, math.prod(self._shape.values()))
        except ValueError:  # a newer XLA writes them in another syntax
            return NONE
        axes = replica_groups.axes_of(groups, self._shape)
        devices = replica_groups.num_devices(axes, self._shape)
        return frozenset(axes) if len(groups[0]) == devices else NONE


def _union(axes: Iterable[Axes]) -> Axes:
    return NONE.union(*axes)
