# SPDX-License-Identifier: Apache-2.0
"""Kinds of calls of one function: what they share, so that they have one program."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, Final, Self

from tessera.graph.compile_stages import Compiled
from tessera.graph.tracer.arguments import Call, ProgramMismatch
from tessera.graph.tracer.static_values import ATOMS, StaticValue
from tessera.jax_compat import jaxprs
from tessera.mesh import opened_within
from tessera.tracing import casts, scope

# How many kinds of calls of one function find their program quickly.
QUICK_CALLS: Final = 32

# Stands for the value of a static leaf that may change in place.
_NEVER: Final = object()


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled program and the call that it was compiled for.

    Attributes:
      call: The call.
      key: What the program depends on: its context, and the arguments as passed.
      placed: The same with uncommitted arrays in the layouts of the step.
      compiled: The program.
    """

    call: Call
    key: Any
    placed: Any
    compiled: Compiled


@dataclass(frozen=True, slots=True)
class CallKind:
    """Calls of one tree of arguments that have one program.

    Attributes:
      program: The program.
      statics: For each static leaf its index; the value, if being this value suffices;
        and the static value.
      is_array: Whether each leaf is an array of the program; empty if all of them are.
    """

    program: Program
    statics: tuple[tuple[int, Any, StaticValue], ...]
    is_array: tuple[bool, ...]

    @classmethod
    def of(cls, program: Program, call: Call) -> Self:
        """The kind of one call."""
        statics: list[tuple[int, Any, StaticValue]] = []
        count = 0
        for argument in call.arguments:
            for index, static in argument.statics:
                is_atom = type(static.value) in ATOMS
                value = static.value if is_atom else _NEVER
                statics.append((count + index, value, static))
            count += len(argument.leaves) + len(argument.statics)
        fixed = {index for index, _, _ in statics}
        is_array = tuple(i not in fixed for i in range(count)) if fixed else ()
        return cls(program, tuple(statics), is_array)

    def check(self, leaves: Sequence[Any]) -> None:
        """Raise ``ProgramMismatch`` if the static leaves have other values."""
        for index, value, static in self.statics:
            found = leaves[index]
            if found is not value and not static.is_equivalent(found):
                raise ProgramMismatch

    def arrays_of(self, leaves: list[Any]) -> list[Any]:
        """The arrays among the leaves of a call."""
        return list(compress(leaves, self.is_array)) if self.is_array else leaves


def context_key() -> Any:
    """What a program depends on besides its function and arguments."""
    ambient = jaxprs.ambient_mesh()
    return (
        opened_within(ambient),
        ambient,
        casts.current_autocast(),
        scope.current_plan(),
        jaxprs.trace_settings(),
    )
