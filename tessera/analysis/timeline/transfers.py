# SPDX-License-Identifier: Apache-2.0
"""Predicts how long the collectives of a program take, and the links that they use."""

import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from tessera.analysis import replica_groups
from tessera.analysis.collective_operands import arrays_of, groups_of, kind_of
from tessera.analysis.hlo import Computation, Instruction
from tessera.analysis.replica_groups import Groups
from tessera.mesh import Mesh
from tessera.targets.link_routes import Link, group_links, permutation_links
from tessera.targets.link_times import (
    Span,
    collective_seconds,
    permutation_span,
    span,
)
from tessera.targets.target import Target

# Transfers that are no collectives: copies between memories, and computations that run
# beside the main stream.
COPY: Final = "copy"
HOST: Final = "host"
COMPUTATION: Final = "computation"

_GROUPS: Final = ("replica_groups", "source_target_pairs", "frontend_attributes")
_CHANNEL: Final = re.compile(r"\bchannel_id=(\d+)")


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
    links: frozenset[Link] = field(repr=False)

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
        self._mesh, self._target = mesh, target
        self._places: dict[str, _Place] = {}

    def transfer(
        self,
        computation: Computation,
        instruction: Instruction,
        caller: Instruction | None = None,
    ) -> Transfer | None:
        """The transfer of a collective; None of anything else.

        A collective in groups of one device moves nothing, and is none.

        Args:
          computation: The one that contains the instruction.
          instruction: Any instruction.
          caller: What runs the computation, where that is one operation.
        """
        kind = kind_of(instruction)
        if not kind:
            return None
        place = self._place(instruction)
        if not place.axes:
            return None
        if caller and kind == "all-reduce" and _is_scattered(computation, instruction):
            kind = "reduce-scatter"
        nbytes = sum(shape.nbytes for shape in arrays_of(computation, instruction))
        machine = self._target.machine
        times = (collective_seconds(machine, kind, nbytes, s) for s in place.spans)
        return Transfer(
            caller or instruction, kind, place.axes, nbytes, max(times), place.links
        )

    def _place(self, instruction: Instruction) -> "_Place":
        """Where the groups of a collective are, which many collectives share."""
        attributes = instruction.attributes
        key = "".join(attributes.get(name, "") for name in _GROUPS)
        if key not in self._places:
            groups = groups_of(instruction, self._mesh.size)
            is_permutation = kind_of(instruction) == "collective-permute"
            self._places[key] = _Place(self._mesh, self._target, groups, is_permutation)
        return self._places[key]


def channel(instruction: Instruction) -> str:
    """The channel of a collective, which is the same where it starts and ends."""
    found = _CHANNEL.search(instruction.tail)
    return found[1] if found else ""


def _is_scattered(computation: Computation, instruction: Instruction) -> bool:
    """Whether each device keeps a slice of a sum: a TPU's fused reduce-scatter."""
    readers = computation.readers(instruction)
    return any(each.opcode == "dynamic-slice" for each in readers)


@dataclass(frozen=True)
class _Place:
    """Where groups of positions in a mesh are on the links of its target."""

    mesh: Mesh
    target: Target
    groups: Groups
    is_permutation: bool

    @cached_property
    def axes(self) -> tuple[str, ...]:
        return replica_groups.axes_of(self.groups, self.mesh.shape)

    @cached_property
    def _devices(self) -> list[tuple[int, ...]]:
        ids = self.mesh.device_ids
        return [tuple(ids[position] for position in group) for group in self.groups]

    @cached_property
    def spans(self) -> frozenset[Span]:
        if self.is_permutation:
            return frozenset({permutation_span(self.target, self._pairs)})
        return frozenset(span(self.target, group) for group in self._devices)

    @cached_property
    def links(self) -> frozenset[Link]:
        if self.is_permutation:
            return frozenset(permutation_links(self.target, self._pairs))
        return frozenset().union(*(group_links(self.target, g) for g in self._devices))

    @property
    def _pairs(self) -> list[tuple[int, int]]:
        return [(sender, receiver) for sender, receiver in self._devices]
