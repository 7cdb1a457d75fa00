# SPDX-License-Identifier: Apache-2.0
"""Finds where the groups of a collective are on the links of a target."""

from dataclasses import dataclass
from typing import Final

from tessera.analysis import replica_groups
from tessera.analysis.collective_operands import groups_of, kind_of
from tessera.analysis.hlo import Instruction
from tessera.mesh import Mesh
from tessera.targets.link_routes import UsedLink, group_links, permutation_links
from tessera.targets.link_times import Span, permutation_span, span
from tessera.targets.target import Target

_GROUPS: Final = ("replica_groups", "source_target_pairs", "frontend_attributes")


@dataclass(frozen=True)
class Place:
    """Where the groups of a collective are on the links of a target.

    Attributes:
      axes: The mesh axes that the groups extend along.
      spans: How the groups lie on the links; of pairs, that which takes longest.
      links: The links that any of the groups uses.
    """

    axes: tuple[str, ...]
    spans: frozenset[Span]
    links: frozenset[UsedLink]


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
            self._places[key] = self._find(instruction)
        return self._places[key]

    def _find(self, instruction: Instruction) -> Place:
        target, ids = self._target, self._mesh.device_ids
        groups = groups_of(instruction, self._mesh.size)
        devices = [tuple(ids[position] for position in group) for group in groups]
        axes = replica_groups.axes_of(groups, self._mesh.shape)
        if kind_of(instruction) == "collective-permute":
            pairs = [(sender, receiver) for sender, receiver in devices]
            span_of_pairs = permutation_span(target, pairs)
            links = frozenset(permutation_links(target, pairs))
            return Place(axes, frozenset({span_of_pairs}), links)
        spans = frozenset(span(target, group) for group in devices)
        used = (group_links(target, group) for group in devices)
        return Place(axes, spans, frozenset().union(*used))
