# SPDX-License-Identifier: Apache-2.0
"""Reads the collectives of a compiled program as rows of the ledger."""

import re
from collections.abc import Iterator
from typing import Final

from tessera.analysis.asynchronous_fusions import (
    AsynchronousFusions,
    Part,
    part_of_node,
)
from tessera.analysis.collective import Collective
from tessera.analysis.collective_operands import arrays_of, keeps_slice, label_of
from tessera.analysis.dataflow import Dataflow
from tessera.analysis.hlo import Instruction
from tessera.analysis.hlo_walk import Node, cause
from tessera.analysis.link_places import Places
from tessera.analysis.loop_counts import LoopCounts
from tessera.analysis.source_lines import user_line
from tessera.mesh import Mesh

# A GPU's compiler writes all collectives as pairs, and those to wait for at once so.
_IS_SYNC: Final = re.compile(r'"is_sync":\s*true')
# Of a collective across slices libtpu keeps the name alone, such as psum.7.
_WRITTEN: Final = re.compile(r'_xla_host_transfer_rendezvous="([a-z_]+)[\d._]*"')


class CollectiveReader:
    """Reads what collectives send.

    Args:
      flow: How values pass through the program.
      mesh: The mesh that it was compiled for.

    Attributes:
      counts: How often the program runs its loops.
      places: Where the groups of its collectives are.
    """

    def __init__(self, flow: Dataflow, mesh: Mesh) -> None:
        self.counts, self.places = LoopCounts(flow), Places(mesh)
        self._flow, self._fusions = flow, AsynchronousFusions(flow.nodes)

    def rows(self) -> Iterator[tuple[Node, Collective]]:
        """Every collective of the program with its row, the first part of several."""
        for node in self._flow.nodes:
            if (row := self.row(node)) and not self._fusions.repeats(node):
                yield node, row

    def row(self, node: Node) -> Collective | None:
        """The row of a collective, without its reason; None of anything else.

        Groups of one device move nothing and have no row. Every part of an asynchronous
        collective has one.
        """
        instruction = node.instruction
        kind = label_of(instruction)
        if not kind or not (place := self.places.place(instruction)).axes:
            return None
        origin = cause(self._flow.module, node)
        outer = node.path[-2][1].opcode if len(node.path) > 1 else ""
        if outer == "fusion" and keeps_slice(node.computation, instruction):
            kind = "reduce-scatter"
        written = _WRITTEN.search(instruction.tail)
        arrays = arrays_of(node.computation, instruction)
        nbytes = sum(array.nbytes for array in arrays)
        return Collective(
            kind=kind,
            axes=place.axes,
            group_size=place.size,
            arrays=arrays,
            calls=self.counts.calls(node),
            conditional=node.is_conditional,
            op_name=f"{origin.op_name}/{written[1]}" if written else origin.op_name,
            source=user_line(self._flow.module.frames(origin)),
            instruction=instruction.name,
            is_async=part_of_node(node) is Part.START
            or outer in ("async-start", "call-start")
            or _is_asynchronous(instruction),
            sent=self.places.sent(place, kind, nbytes),
        )


def _is_asynchronous(instruction: Instruction) -> bool:
    is_start = instruction.opcode.endswith("-start") or instruction.opcode == "send"
    return is_start and not _IS_SYNC.search(instruction.tail)
