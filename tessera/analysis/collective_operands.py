# SPDX-License-Identifier: Apache-2.0
"""Reads what a collective of a compiled program is: its kind, pairs and arrays."""

import re
from typing import Final

from tessera.analysis import replica_groups
from tessera.analysis.collective import KINDS
from tessera.analysis.hlo import Computation, Instruction, Shape
from tessera.analysis.replica_groups import Groups, parse_pairs

_GROUPED: Final = frozenset(("replica_groups", "source_target_pairs"))
_PERMUTE: Final = "collective-permute"
# XLA may split a permute into send and recv: the pairs are an attribute of the send.
_SEND_PAIRS: Final = re.compile(
    r"_xla_send_recv_source_target_pairs=\"?(\{(?:\{[\d,\s]*\},?)*\})"
)


def kind_of(instruction: Instruction) -> str:
    """The kind of the collective that an instruction is or starts; ``""`` of others."""
    if instruction.opcode == "send":
        return _PERMUTE if pairs_of(instruction) else ""
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in KINDS else ""


def label_of(instruction: Instruction) -> str:
    """The kind of a collective, marked where it is none of ``KINDS``; ``""`` of others.

    A newer XLA may have other kinds; all have groups, or pairs, of devices.
    """
    if kind := kind_of(instruction):
        return kind
    is_one = not _GROUPED.isdisjoint(instruction.attributes)
    return f"unknown: {instruction.opcode.removesuffix('-start')}" if is_one else ""


def groups_of(instruction: Instruction, num_devices: int) -> Groups:
    """The groups of a collective; of a permutation its pairs.

    Args:
      instruction: The collective, or what starts it.
      num_devices: Devices of the program.

    Returns:
      Positions in the program's list of devices.

    Raises:
      ValueError: They are in a syntax that is unknown.
    """
    if "source_target_pairs" in instruction.attributes or instruction.opcode == "send":
        return pairs_of(instruction)
    text = instruction.attributes.get("replica_groups", "")
    return replica_groups.parse(text, num_devices)


def pairs_of(instruction: Instruction) -> tuple[tuple[int, int], ...]:
    """The (sender, receiver) pairs of an instruction that lists them."""
    if instruction.opcode == "send":
        attributes = instruction.attributes.get("frontend_attributes", "")
        pairs = _SEND_PAIRS.search(attributes)
        return parse_pairs(pairs[1]) if pairs else ()
    return parse_pairs(instruction.attributes.get("source_target_pairs", ""))


def arrays_of(computation: Computation, instruction: Instruction) -> tuple[Shape, ...]:
    """The arrays that a collective moves, as shapes on one device.

    Args:
      computation: The one that contains the collective.
      instruction: The collective, or what starts it.

    Returns:
      The result of an all-gather, the operands of every other kind.
    """
    kind = kind_of(instruction)
    if kind == "all-gather":
        # The result of its asynchronous form is the operands, then the results.
        is_async = instruction.opcode != kind
        return instruction.elements[1] if is_async else instruction.shapes
    moved = computation.operand_shapes(instruction)
    arrays = tuple(shape for shape in moved if shape.dtype != "token")
    if kind == "all-to-all" and len(arrays) > 1:
        # One array in as many pieces as there are receivers.
        return (Shape(arrays[0].dtype, (len(arrays), *arrays[0].dims)),)
    return arrays


def keeps_slice(computation: Computation, instruction: Instruction) -> bool:
    """Whether an all-reduce is a TPU's reduce-scatter: cut in the fusion that sums.

    Args:
      computation: The one that contains the instruction, which a fusion runs.
      instruction: A collective.
    """
    readers = computation.readers(instruction)
    is_sum = kind_of(instruction) == "all-reduce"
    return is_sum and any(each.opcode == "dynamic-slice" for each in readers)
