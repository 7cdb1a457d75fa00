# SPDX-License-Identifier: Apache-2.0
"""What a converted function may give back."""

from collections.abc import Iterable
from typing import Any

from tessera.compiler.trace.control_flow.block_state import Undefined
from tessera.compiler.trace.control_flow.printing import RuntimeText, text_error


def require_known(leaves: Iterable[Any]) -> None:
    """Refuse results that are known only when the program runs, and are no arrays.

    Args:
      leaves: The leaves of a function's result.

    Raises:
      ControlFlowError: [T319] text with traced values in it.
      BranchError: [T318] a variable that has no value, or none on one way.
    """
    for leaf in leaves:
        if isinstance(leaf, RuntimeText):
            raise text_error("a result")
        if isinstance(leaf, Undefined):
            leaf.read()
