# SPDX-License-Identifier: Apache-2.0
"""Counts how often a compiled program runs what it contains."""

import math
from collections.abc import Iterator, Mapping
from typing import Final

from tessera.analysis.constant_values import Frame
from tessera.analysis.hlo import Module
from tessera.analysis.hlo_walk import Node, trip_count

_CALLS: Final = ("call", "call-start", "async-start")


class LoopCounts:
    """How often each loop of a program runs its body.

    XLA records it on CPUs and GPUs. On TPUs it does not, and it is computed from the
    constants that the loops count with.

    Args:
      module: The program.
    """

    def __init__(self, module: Module) -> None:
        loops = [
            instruction
            for computation in module.computations.values()
            for instruction in computation.instructions.values()
            if instruction.opcode == "while"
        ]
        recorded = {loop.name: trip_count(loop) for loop in loops}
        self._counts: Mapping[str, int | None] = recorded
        if None in recorded.values():
            self._counts = _merged(_computed(Frame.entry(module)))

    def calls(self, node: Node) -> int | None:
        """How often one execution of the program runs an instruction.

        None inside a loop whose length is known only at run time.
        """
        loops = [outer.name for _, outer in node.path[:-1] if outer.opcode == "while"]
        counts = [self._counts.get(name) for name in loops]
        known = [count for count in counts if count is not None]
        return math.prod(known) if len(known) == len(loops) else None


def _computed(frame: Frame) -> Iterator[tuple[str, int | None]]:
    """The loops that a computation runs, by name, and their counts."""
    for instruction in frame.computation.instructions.values():
        inner: list[Frame] = []
        if instruction.opcode == "while":
            yield instruction.name, frame.count(instruction)
            inner = [frame.body(instruction)]
        elif instruction.opcode == "conditional":
            branches = range(len(frame.module.callees(instruction)))
            inner = [frame.branch(instruction, number) for number in branches]
        elif instruction.opcode in _CALLS:
            callees = frame.module.callees(instruction)
            inner = [frame.call(instruction, callee) for callee in callees]
        for each in inner:
            yield from _computed(each)


def _merged(counts: Iterator[tuple[str, int | None]]) -> dict[str, int | None]:
    """Counts by loop; None where a loop that is run from several places has several."""
    merged: dict[str, int | None] = {}
    for name, count in counts:
        merged[name] = count if merged.get(name, count) == count else None
    return merged
