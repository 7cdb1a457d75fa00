# SPDX-License-Identifier: Apache-2.0
"""Recognizes the parts of an asynchronous collective that a TPU writes as fusions.

One fusion starts it, one waits for its end, and those in between compute while it is
under way. Each contains the collective, with the same channel, though it runs once.
"""

import itertools
import re
from collections.abc import Iterable
from enum import Enum
from typing import Final

from tessera.analysis.collective_operands import kind_of
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


def ends(nodes: Iterable[Node]) -> dict[Names, Node]:
    """The fusion that waits for each collective, by the names of what starts it.

    Args:
      nodes: Every instruction that a program executes.
    """
    parts: dict[Part, dict[tuple[Names, str], Node]] = {Part.START: {}, Part.END: {}}
    for node in nodes:
        if kind_of(node.instruction) and (part := part_of_node(node)) in parts:
            around = node.caller().names[:-1]
            parts[part][around, channel(node.instruction)] = node
    return {
        start.names: parts[Part.END][key].caller()
        for key, start in parts[Part.START].items()
        if key in parts[Part.END]
    }


def channel(instruction: Instruction) -> str:
    """The channel of a collective, which is the same in all of its parts."""
    found = _CHANNEL.search(instruction.tail)
    return found[1] if found else ""
