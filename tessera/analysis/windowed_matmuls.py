# SPDX-License-Identifier: Apache-2.0
"""Recognizes matmuls that XLA divides into windows, with permutes between them.

Instead of gathering an operand first, each device passes its part on to the next and
multiplies by the one that it has; instead of scattering a sum at the end, each passes
on what it has added up. XLA names the loops of either ``windowed_dot_general``.
"""

import re
from collections.abc import Mapping
from enum import Enum
from typing import Final

from tessera.analysis.hlo import Instruction, Module

_BODY: Final = re.compile(r"windowed_dot_general_body_(ag|rs)")


class Window(Enum):
    """What the permutes of a windowed matmul stand for."""

    ALL_GATHER = "ag"
    REDUCE_SCATTER = "rs"


class WindowedMatmuls:
    """The windowed matmuls of a program.

    Args:
      module: The program.
    """

    def __init__(self, module: Module) -> None:
        self._windows: Mapping[str, Window] = {
            loop.attributes.get("metadata", ""): Window(found[1])
            for computation in module.computations.values()
            for loop in computation.instructions.values()
            if loop.opcode == "while"
            and (found := _BODY.search(loop.called["body"][0]))
        }

    def window(self, permute: Instruction) -> Window | None:
        """What a permute is part of; it may be in the loop, or before or after it."""
        metadata = permute.attributes.get("metadata", "")
        return self._windows.get(metadata) if metadata else None
