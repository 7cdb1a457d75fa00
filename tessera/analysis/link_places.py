# SPDX-License-Identifier: Apache-2.0
"""Finds which devices a collective connects, and where they are on a target's links."""

from dataclasses import dataclass
from typing import Final

from tessera.analysis import replica_groups
from tessera.analysis.collective_operands import groups_of, kind_of
from tessera.analysis.hlo import Instruction
from tessera.mesh import Mesh
from tessera.targets.link_routes import UsedLink, group_links, permutation_links
from tessera.targets.link_times import Span, level_bytes, permutation_span, span

_GROUPS: Final = ("replica_groups", "source_target_pairs", "frontend_attributes")


@dataclass(frozen=True)
class Place:
    """The groups of devices of a collective.

    Attributes:
      axes: The mesh axes that the groups extend along; ``("?",)`` where they are in a
        syntax of a newer XLA, or have devices that the mesh does not have.
      size: Devices that communicate with each other.
      spans: How the groups lie on the links; of pairs, that which takes longest. None
        without a target, or where the groups are unknown.
      links: The links that any of the groups uses.
    """

    axes: tuple[str, ...]
    size: int
    spans: frozenset[Span] = frozenset()
    links: frozenset[UsedLink] = frozenset()


class Places:
    """The places of the collectives of a program, which many of them share.

    Args:
      mesh: The mesh of the program, in the order of its devices.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._places: dict[str, Place] = {}

    def place(self, instruction: Instruction) -> Place:
        """Where the groups of a collective are."""
        attributes = instruction.attributes
        key = "".join(attributes.get(name, "") for name in _GROUPS)
        if key not in self._places:
            self._places[key] = self._find(instruction)
        return self._places[key]

    def sent(
        self, place: Place, kind: str, nbytes: int
    ) -> tuple[tuple[str, float], ...]:
        """Bytes that a device sends over each level of links, in one call.

        Args:
          place: Where the groups of a collective are.
          kind: XLA's name of it.
          nbytes: The arrays that it moves.
        """
        target = self._mesh.target
        spans = [where for where in place.spans if where.size > 1]
        if target is None or not spans:
            return ()
        levels = [level_bytes(target.machine, kind, nbytes, where) for where in spans]
        return tuple((link.name, max(e[link] for e in levels)) for link in levels[0])

    def _find(self, instruction: Instruction) -> Place:
        target, ids = self._mesh.target, self._mesh.device_ids
        try:
            groups = groups_of(instruction, self._mesh.size)
        except ValueError:  # a newer XLA writes them in another syntax
            return Place(replica_groups.UNKNOWN, self._mesh.size)
        axes = replica_groups.axes_of(groups, self._mesh.shape)
        size = replica_groups.num_devices(axes, self._mesh.shape)
        if "replica_groups" in instruction.attributes:
            size = len(groups[0])
        if target is None or axes == replica_groups.UNKNOWN:
            return Place(axes, size)
        devices = [tuple(ids[position] for position in group) for group in groups]
        if kind_of(instruction) == "collective-permute":
            pairs = [(sender, receiver) for sender, receiver in devices]
            span_of_pairs = permutation_span(target, pairs)
            links = frozenset(permutation_links(target, pairs))
            return Place(axes, size, frozenset({span_of_pairs}), links)
        spans = frozenset(span(target, group) for group in devices)
        used = (group_links(target, group) for group in devices)
        return Place(axes, size, spans, frozenset().union(*used))
