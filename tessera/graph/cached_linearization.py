# SPDX-License-Identifier: Apache-2.0
"""Differentiates equal equations once, as JAX does for the functions of ``jnp``.

JAX derives the linearization of a primitive each time that it is applied, and that of a
nested program once. The equations of a model repeat with its layers, so each kind of
equation becomes a ``jax.jit`` of its own, which is inlined wherever it is applied.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from tessera.jax_compat import jaxprs, primitives


class CachedLinearization:
    """Applies equations such that JAX derives each kind's linearization once."""

    def __init__(self) -> None:
        self._calls: dict[Any, Callable[..., list[Any]]] = {}

    def bind(self, equation: jaxprs.Equation, values: Sequence[Any]) -> list[Any]:
        """The results of an equation, its source line and name scopes kept."""
        call = self._call(equation, values)
        if call is None:
            return jaxprs.bind(equation, values)
        with jaxprs.source_context(equation):
            return call(*values)

    def _call(
        self, equation: jaxprs.Equation, values: Sequence[Any]
    ) -> Callable[..., list[Any]] | None:
        """A call of the equation alone; None if it is to be applied itself."""
        if equation.effects or any(jaxprs.nested(equation)):
            return None
        if [atom.aval for atom in equation.invars] != [*map(jax.typeof, values)]:
            return None  # its results may have other types than it says
        kind = primitives.kind(equation)
        if kind is None:
            return None
        if kind not in self._calls:
            self._calls[kind] = primitives.as_inlined_jit(equation)
        return self._calls[kind]
