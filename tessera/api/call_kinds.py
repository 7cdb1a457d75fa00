# SPDX-License-Identifier: Apache-2.0
"""Kinds of calls of one function: what they share, so that they have one program."""

from dataclasses import dataclass
from typing import Any, Final, Self

from tessera import _jax, casts, scope
from tessera.compiler.compile_stages import Compiled
from tessera.compiler.trace.arguments import Call
from tessera.compiler.trace.call_signature import CallPattern, LeafRoles
from tessera.mesh import opened_or_none

# How many kinds of calls of one function find their program quickly.
QUICK_CALLS: Final = 32


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled program and the call that it was compiled for."""

    call: Call
    compiled: Compiled


@dataclass(frozen=True, slots=True)
class CallKind:
    """Calls that are written alike and have one program.

    Attributes:
      program: The program.
      pattern: How the calls pass their arguments.
      roles: Which of their leaves are arrays.
      writes: Whether the arguments change.
      returns_result: Whether the function returns what the program does.
    """

    program: Program
    pattern: CallPattern
    roles: LeafRoles
    writes: bool
    returns_result: bool

    @classmethod
    def of(cls, program: Program, pattern: CallPattern, call: Call, tree: Any) -> Self:
        """The kind of one call, by the tree of its arguments."""
        compiled = program.compiled
        writes = bool(compiled.traced.origin.writes)
        is_result = not writes and compiled.returns_result
        return cls(program, pattern, pattern.leaf_roles(call, tree), writes, is_result)


def context_key() -> Any:
    """What a program depends on besides its function and arguments."""
    return (
        opened_or_none(),
        casts.current_autocast(),
        scope.current_plan(),
        _jax.trace_settings(),
    )
