# SPDX-License-Identifier: Apache-2.0
"""Lifts the arrays that a program closes over to inputs: it holds no constants.

JAX hoists what the body of a loop closes over and leaves what a nested ``jax.jit``
closes over inside it, where it would be a constant of the compiled module.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tessera import _jax
from tessera.compiler import rewriting


def lift_captures(program: _jax.Program) -> tuple[_jax.Program, list[Any]]:
    """A program whose captured arrays are its last inputs, and those arrays.

    An array is one input however often it is used. What a ``jit`` inside a loop closes
    over stays there, as it does in JAX.
    """
    return _jax.lift_constants(_hoisted(program))


def snapshot(array: Any) -> Any:
    """A captured array as it is now: a copy of NumPy's, which may change in place.

    A program keeps the values of its trace, as one of ``jax.jit`` does.
    """
    return array.copy() if isinstance(array, np.ndarray) else array


def _hoisted(program: _jax.Program) -> _jax.Program:
    """The program with the constants of nested ``jit`` s as its own."""
    if not any(map(_holds_arrays, _jax.equations(program))):
        return program

    def hoist(equation: _jax.Equation, operands: Sequence[Any]) -> list[Any]:
        if not _holds_arrays(equation):
            return _jax.bind(equation, operands)
        if _jax.is_shard_map(equation):
            return rewriting.bind_with_nested(
                equation, operands, lambda p, v: _jax.evaluate(_hoisted(p), *v)
            )
        inner, arrays = lift_captures(equation.params["jaxpr"])
        params = _jax.jit_params(equation, inner)
        return _jax.bind(equation, [*operands, *arrays], params)

    return rewriting.retrace(program, hoist)


def _holds_arrays(equation: _jax.Equation) -> bool:
    if not (_jax.is_jit(equation) or _jax.is_shard_map(equation)):
        return False
    inner = equation.params["jaxpr"]
    return bool(_jax.constants(inner)) or any(map(_holds_arrays, _jax.equations(inner)))
