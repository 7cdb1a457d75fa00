# SPDX-License-Identifier: Apache-2.0
"""Recognizes matmuls that XLA divides into windows, with permutes between them.

Instead of gathering an operand first, each device passes its part on to the next and
multiplies by the one that it has; instead of scattering a sum at the end, each passes
on what it has added up. XLA names the loops of either ``windowed_dot_general``.
"""

import re
from typing import Final

from tessera.analysis.hlo import Module

_BODY: Final = re.compile(r"windowed_dot_general_body_(ag|rs)")
_KINDS: Final = {"ag": "all-gather", "rs": "reduce-scatter"}


def windowed_kinds(module: Module) -> dict[str, str]:
    """The kind of collective that permutes stand for, by their metadata.

    A windowed matmul's permutes are in its loop, or before or after it, and have its
    metadata.
    """
    return {
        metadata: _KINDS[found[1]]
        for computation in module.computations.values()
        for loop in computation.instructions.values()
        if loop.opcode == "while"
        and (found := _BODY.search(loop.called["body"][0]))
        and (metadata := loop.attributes.get("metadata"))
    }
