# SPDX-License-Identifier: Apache-2.0
"""Lifts the arrays that a program closes over to inputs: it holds no constants.

JAX hoists what the body of a loop closes over and leaves what a nested ``jax.jit``
closes over inside it, where it would be a constant of the compiled module.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tessera.graph import rewriting
from tessera.jax_compat import jaxprs, primitives


def lift_captures(program: jaxprs.Program) -> tuple[jaxprs.Program, list[Any]]:
    """A program whose captured arrays are its last inputs, and those arrays.

    An array is one input however often it is used. What a ``jit`` inside a loop closes
    over stays there, as it does in JAX.
    """
    return jaxprs.lift_constants(_hoisted(program))


def snapshot(array: Any) -> Any:
    """A captured array as it is now: a copy of NumPy's, which may change in place.

    A program keeps the values of its trace, as one of ``jax.jit`` does.
    """
    return array.copy() if isinstance(array, np.ndarray) else array


def _hoisted(program: jaxprs.Program) -> jaxprs.Program:
    """The program with the constants of nested ``jit`` s as its own."""
    if not any(map(_holds_arrays, jaxprs.equations(program))):
        return program

    def hoist(equation: jaxprs.Equation, operands: Sequence[Any]) -> list[Any]:
        if not _holds_arrays(equation):
            return jaxprs.bind(equation, operands)
        if jaxprs.is_shard_map(equation):
            return rewriting.bind_with_nested(
                equation, operands, lambda p, v: jaxprs.evaluate(_hoisted(p), *v)
            )
        inner, arrays = lift_captures(primitives.body(equation))
        params = jaxprs.jit_params(equation, inner)
        return jaxprs.bind(equation, [*operands, *arrays], params)

    return rewriting.retrace(program, hoist)


def _holds_arrays(equation: jaxprs.Equation) -> bool:
    if not (jaxprs.is_jit(equation) or jaxprs.is_shard_map(equation)):
        return False
    inner = primitives.body(equation)
    return bool(jaxprs.constants(inner)) or any(
        map(_holds_arrays, jaxprs.equations(inner))
    )
