# SPDX-License-Identifier: Apache-2.0
"""Differentiates equal equations once, as JAX does for the functions of ``jnp``.

JAX derives the linearization of a primitive each time that it is applied, and that of a
nested program once. The equations of a model repeat with its layers, so each kind of
equation becomes a program of its own, which JAX inlines wherever it is applied.
"""

from collections.abc import Sequence
from typing import Any

import jax

from tessera import _jax, _jax_traces


class CachedLinearization:
    """Applies equations such that JAX derives each kind's linearization once."""

    def __init__(self) -> None:
        self._calls: dict[Any, _jax.Equation] = {}

    def bind(self, equation: _jax.Equation, values: Sequence[Any]) -> list[Any]:
        """The results of an equation, its source line and name scopes kept."""
        call = self._call(equation, values)
        if call is None:
            return _jax.bind(equation, values)
        equation = equation.replace(primitive=call.primitive)
        return _jax.bind(equation, values, call.params)

    def _call(
        self, equation: _jax.Equation, values: Sequence[Any]
    ) -> _jax.Equation | None:
        """A call of a program that is the equation alone; None if it has no such."""
        params = equation.params
        # Floats may be equal and not the same: 0.0 and -0.0.
        is_float = any(isinstance(value, float) for value in params.values())
        if is_float or equation.effects or any(_jax.nested(equation)):
            return None
        types = tuple(map(jax.typeof, values))
        key = (equation.primitive, tuple(params.items()), types, equation.ctx)
        try:
            found = self._calls.get(key)
        except TypeError:
            return None  # a parameter is not hashable
        if found is None:
            found = _jax_traces.inlined_call(equation, map(_jax.struct, types))
            self._calls[key] = found
        return found
