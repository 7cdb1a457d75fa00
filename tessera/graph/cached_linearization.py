# SPDX-License-Identifier: Apache-2.0
"""Differentiates equal equations once, as JAX does for the functions of ``jnp``.

JAX derives the linearization of a primitive each time that it is applied, and that of a
nested program once. The equations of a model repeat with its layers, so each kind of
equation becomes a program of its own, which is inlined wherever it is applied.
"""

from collections.abc import Sequence
from typing import Any

import jax

from tessera.jax_compat import jaxprs, linearization


class CachedLinearization:
    """Applies equations such that JAX derives each kind's linearization once."""

    def __init__(self) -> None:
        self._programs: dict[Any, jaxprs.Program] = {}

    def bind(self, equation: jaxprs.Equation, values: Sequence[Any]) -> list[Any]:
        """The results of an equation, its source line and name scopes kept."""
        program = self._program(equation, values)
        if program is None:
            return jaxprs.bind(equation, values)
        with jaxprs.source_context(equation):
            return linearization.inlined_p.bind(*values, program=program)

    def _program(
        self, equation: jaxprs.Equation, values: Sequence[Any]
    ) -> jaxprs.Program | None:
        """A program that is the equation alone; None if it is to be applied itself."""
        if equation.effects or any(jaxprs.nested(equation)):
            return None
        types = [atom.aval for atom in equation.invars]
        if types != [*map(jax.typeof, values)]:
            return None  # its results may have other types than it says
        key = linearization.key(equation)
        if key is None:
            return None
        if key not in self._programs:
            self._programs[key] = linearization.of_one_equation(equation)
        return self._programs[key]
