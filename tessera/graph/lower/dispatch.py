# SPDX-License-Identifier: Apache-2.0
"""Runs a compiled program for the arrays of a call, if it was compiled for such arrays.

Choosing a program must be cheap, and running one for arrays that it was not compiled
for must be impossible. So the full comparison of a call with a program is made once for
each signature of the arrays, and the signature is remembered: by JAX's C++ dispatch,
which costs nothing beyond the call, and here for programs and arrays that it does not
take.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.tree_util import PyTreeDef

from tessera.graph.tracer.argument_leaves import (
    is_stored,
    leaf_signature,
    stored_arrays,
)
from tessera.graph.tracer.arguments import ProgramMismatch
from tessera.jax_compat import checked_calls
from tessera.jax_compat.checked_calls import OtherMemoryLayout


class _NotStored(Exception):
    """Some of the arrays are not what the program takes, but stand for it."""


class Dispatch:
    """A compiled program that runs for arrays of accepted signatures alone.

    Args:
      compiled: The program.
      num_arrays: How many arrays it takes of a call's arguments.
      num_parameters: How many parameters it takes after them.
      num_captured: How many captured arrays it takes after these.
      result: The tree of its result; None makes it a list.
    """

    def __init__(
        self,
        compiled: jax.stages.Compiled,
        num_arrays: int,
        num_parameters: int,
        num_captured: int,
        result: PyTreeDef | None = None,
    ) -> None:
        self._ends = num_arrays, num_arrays + num_parameters
        self._accepted: set[Any] = set()
        accepted = self._accepted

        def check(leaves: Sequence[Any]) -> None:
            arrays = leaves[:num_arrays]
            if not _is_accepted(accepted, arrays):
                raise ProgramMismatch
            if not all(map(is_stored, arrays)):
                raise _NotStored

        example = [0] * num_arrays, (0,) * num_parameters, (0,) * num_captured
        self._run = checked_calls.checked_call(compiled, example, check, result)
        # For the arrays that stand for others, whose signatures were accepted.
        self._run_stored = checked_calls.checked_call(
            compiled, example, lambda _: None, result
        )

    def accept(self, arrays: Sequence[Any]) -> None:
        """Declare that the program was compiled for arrays like these."""
        self._accepted.add(_signature(arrays))

    def __call__(
        self, arrays: list[Any], parameters: tuple[Any, ...], captured: tuple[Any, ...]
    ) -> Any:
        """What the program returns.

        Args:
          arrays: Of the arguments, in the program's order.
          parameters: The arrays of its parameters.
          captured: The arrays that it closes over.

        Raises:
          ProgramMismatch: It was not compiled for such arrays; nothing has run.
        """
        try:
            return self._run(arrays, parameters, captured)
        except _NotStored:
            parts = stored_arrays(arrays), parameters, captured
        except OtherMemoryLayout as other:
            parts = self._parts(other.arrays)
        try:
            return self._run_stored(*parts)
        except OtherMemoryLayout as other:
            return self._run_stored(*self._parts(other.arrays))

    def _parts(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """The arrays, parameters and captured arrays among the leaves of a call."""
        first, second = self._ends
        return list(leaves[:first]), tuple(leaves[first:second]), tuple(leaves[second:])


def _signature(arrays: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(map(leaf_signature, arrays))


def _is_accepted(accepted: set[Any], arrays: Sequence[Any]) -> bool:
    try:
        return _signature(arrays) in accepted
    except TypeError:  # a value without a hash is no array
        return False
