# SPDX-License-Identifier: Apache-2.0
"""Finds where the groups of a collective are on the links of a target."""

from dataclasses import dataclass
from functools import cached_property
from typing import Final

from tessera.analysis import replica_groups
from tessera.analysis.collective_operands import groups_of, kind_of
from tessera.analysis.hlo import Instruction
from tessera.analysis.replica_groups import Groups
from tessera.mesh import Mesh
from tessera.targets.link_routes import Link, group_links, permutation_links
from tessera.targets.link_times import Span, permutation_span, span
from tessera.targets.target import Target

_GROUPS: Final = ("replica_groups", "source_target_pairs", "frontend_attributes")


@dataclass(frozen=True)
class Place:
    """Where groups of positions in a mesh are on the links of its target.

    Attributes:
      mesh: The mesh, in the order of the program's devices.
      target: The machine that its devices are of.
      groups: Positions in the mesh; of a permutation its pairs.
      is_permutation: Whether they are pairs.
    """

    mesh: Mesh
    target: Target
    groups: Groups
    is_permutation: bool

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The axes that the groups extend along."""
        return replica_groups.axes_of(self.groups, self.mesh.shape)

    @cached_property
    def _devices(self) -> list[tuple[int, ...]]:
        ids = self.mesh.device_ids
        return [tuple(ids[position] for position in group) for group in self.groups]

    @cached_property
    def spans(self) -> frozenset[Span]:
        """How the groups lie on the links; of pairs, that which takes longest."""
        if self.is_permutation:
            return frozenset({permutation_span(self.target, self._pairs)})
        return frozenset(span(self.target, group) for group in self._devices)

    @cached_property
    def links(self) -> frozenset[Link]:
        """The links that any of the groups uses."""
        if self.is_permutation:
            return frozenset(permutation_links(self.target, self._pairs))
        return frozenset().union(*(group_links(self.target, g) for g in self._devices))

    @property
    def _pairs(self) -> list[tuple[int, int]]:
        return [(sender, receiver) for sender, receiver in self._devices]


class Places:
    """The places of the collectives of a program, which many of them share.

    Args:
      mesh: The mesh of the program, in the order of its devices.
      target: The machine that its devices are of.
    """

    def __init__(self, mesh: Mesh, target: Target) -> None:
        self._mesh, self._target = mesh, target
        self._places: dict[str, Place] = {}

    def place(self, instruction: Instruction) -> Place:
        """Where the groups of a collective are."""
        attributes = instruction.attributes
        key = "".join(attributes.get(name, "") for name in _GROUPS)
        if key not in self._places:
            groups = groups_of(instruction, self._mesh.size)
            is_permutation = kind_of(instruction) == "collective-permute"
            self._places[key] = Place(self._mesh, self._target, groups, is_permutation)
        return self._places[key]
