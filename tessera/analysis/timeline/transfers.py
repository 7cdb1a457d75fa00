# SPDX-License-Identifier: Apache-2.0
"""Predicts how long the collectives of a program take, and the links that they use."""

from dataclasses import dataclass, field
from typing import Final

from tessera.analysis.collective import KINDS
from tessera.analysis.collective_operands import (
    arrays_of,
    keeps_slice,
    kind_of,
    label_of,
)
from tessera.analysis.hlo import Computation, Instruction
from tessera.analysis.link_places import Places
from tessera.analysis.replica_groups import UNKNOWN
from tessera.mesh import Mesh
from tessera.targets.link_routes import UsedLink
from tessera.targets.link_times import collective_seconds
from tessera.targets.target import Target

# Transfers that are no collectives: copies between memories, and computations that run
# beside the main stream.
COPY: Final = "copy"
HOST: Final = "host"
COMPUTATION: Final = "computation"


@dataclass(frozen=True)
class Transfer:
    """What runs beside the stream of computation, or blocks it.

    Attributes:
      instruction: What starts it.
      kind: XLA's name of a collective, ``copy`` or ``computation``.
      axes: The mesh axes that a collective runs over.
      nbytes: Bytes of a collective as the ledger counts them, or of a copy.
      seconds: How long it takes once its links are free.
      links: What it cannot share with another transfer at the same time.
    """

    instruction: Instruction
    kind: str
    axes: tuple[str, ...]
    nbytes: int
    seconds: float
    links: frozenset[UsedLink] = field(repr=False)

    @property
    def name(self) -> str:
        """XLA's name of what starts it."""
        return self.instruction.name


class Collectives:
    """Predicts the collectives of a program on the links of a target.

    Args:
      mesh: The mesh of the program, in the order of its devices.
      target: The machine that its devices are of.
    """

    def __init__(self, mesh: Mesh, target: Target) -> None:
        self._target = target
        self._places = Places(mesh)

    def is_unknown(self, instruction: Instruction) -> bool:
        """Whether it is a collective of which a newer XLA knows how long it takes."""
        label = label_of(instruction)
        is_known = label in KINDS and self._places.place(instruction).axes != UNKNOWN
        return bool(label) and not is_known

    def transfer(
        self,
        computation: Computation,
        instruction: Instruction,
        caller: Instruction | None = None,
    ) -> Transfer | None:
        """The transfer of a collective; None of anything else.

        A collective in groups of one device moves nothing, and is none; one of unknown
        groups has an unknown time, and is none either.

        Args:
          computation: The one that contains the instruction.
          instruction: Any instruction.
          caller: What runs the computation, where that is one operation.
        """
        kind = kind_of(instruction)
        if not kind:
            return None
        place = self._places.place(instruction)
        if not place.axes or place.axes == UNKNOWN:
            return None
        if caller and keeps_slice(computation, instruction):
            kind = "reduce-scatter"
        nbytes = sum(shape.nbytes for shape in arrays_of(computation, instruction))
        machine = self._target.machine
        times = (collective_seconds(machine, kind, nbytes, s) for s in place.spans)
        return Transfer(
            caller or instruction, kind, place.axes, nbytes, max(times), place.links
        )
