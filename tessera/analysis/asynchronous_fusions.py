# SPDX-License-Identifier: Apache-2.0
"""Recognizes the parts of an asynchronous collective that a TPU writes as fusions.

One fusion starts it, one waits for its end, and those in between compute while it is
under way. Each contains the collective, with the same channel, though it runs once.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable
from enum import Enum
from typing import Final

from tessera.analysis.collective_operands import label_of
from tessera.analysis.hlo import Computation, Instruction
from tessera.analysis.hlo_walk import Names, Node

_CHANNEL: Final = re.compile(r"\bchannel_id=(\d+)")
_TARGET: Final = re.compile(r'custom_call_target="AsyncCollective(Start|Done)"')


class Part(Enum):
    """What a fusion is to the collective that it contains."""

    WHOLE = "whole"
    START = "start"
    BETWEEN = "between"
    END = "end"


def part_of(computation: Computation, collective: Instruction) -> Part:
    """The part that a computation is of a collective that it contains.

    Args:
      computation: What a fusion runs.
      collective: The collective, in it or in a fusion that it contains.
    """
    for instruction in computation.instructions.values():
        is_call = instruction.opcode == "custom-call"
        if is_call and (found := _TARGET.search(instruction.tail)):
            return Part.START if found[1] == "Start" else Part.END
    if "async_collective_fusion_config" in collective.tail:
        return Part.BETWEEN
    return Part.WHOLE


def part_of_node(node: Node) -> Part:
    """The part that the fusions around a collective are of it."""
    for (_, outer), (computation, _) in itertools.pairwise(node.path):
        if outer.opcode == "fusion":
            return part_of(computation, node.instruction)
    return Part.WHOLE


class AsynchronousFusions:
    """The collectives of a program that start in one fusion and end in another.

    Args:
      nodes: Every instruction that the program executes.
    """

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._parts: dict[tuple[Names, str], dict[Part, Node]] = defaultdict(dict)
        self._started: set[str] = set()
        for node in nodes:
            if label_of(node.instruction):
                part = part_of_node(node)
                self._parts[self._key(node)][part] = node
                if part is Part.START:
                    self._started.add(channel(node.instruction))

    def repeats(self, node: Node) -> bool:
        """Whether a collective is only a later part of one that started elsewhere."""
        is_later = part_of_node(node) in (Part.BETWEEN, Part.END)
        return is_later and channel(node.instruction) in self._started

    def end(self, node: Node) -> Node:
        """The fusion that waits for a collective which starts here; else itself."""
        parts = self._parts.get(self._key(node), {})
        is_start = Part.START in parts and parts[Part.START].names == node.names
        return parts[Part.END].caller() if is_start and Part.END in parts else node

    def _key(self, node: Node) -> tuple[Names, str]:
        return node.caller().names[:-1], channel(node.instruction)


def channel(instruction: Instruction) -> str:
    """The channel of a collective, which is the same in all of its parts."""
    found = _CHANNEL.search(instruction.tail)
    return found[1] if found else ""
