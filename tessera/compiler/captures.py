# SPDX-License-Identifier: Apache-2.0
"""Arrays that a program holds on to become its inputs; nothing is baked in.

JAX hoists what the body of a loop closes over and leaves what a nested ``jax.jit``
closes over inside it, where it would be a constant of the compiled module.
"""

from collections.abc import Sequence
from typing import Any

from tessera import _jax
from tessera.compiler import rewriting


def lift_captures(program: _jax.Program) -> tuple[_jax.Program, list[Any]]:
    """A program whose captured arrays are inputs after the others, and those arrays.

    An array is one input however often it is used. What a ``jit`` inside a loop holds
    stays there, as it does in JAX.
    """
    return _jax.lift_constants(_hoisted(program))


def _hoisted(program: _jax.Program) -> _jax.Program:
    """The same program, holding itself what its nested ``jit`` s held."""
    if not any(map(_holds_arrays, _jax.equations(program))):
        return program

    def interpret(inner: _jax.Program, values: Sequence[Any]) -> list[Any]:
        return _jax.evaluate(_hoisted(inner), *values)

    def run(*values: Any) -> list[Any]:
        env = rewriting.Environment(program, values)
        for equation in _jax.equations(program):
            operands = [env.read(atom) for atom in equation.invars]
            if not _holds_arrays(equation):
                results = _jax.bind(equation, operands)
            elif _jax.is_manual_region(equation):
                results = rewriting.bind_with_nested(equation, operands, interpret)
            else:
                inner, arrays = lift_captures(equation.params["jaxpr"])
                params = _jax.jit_params(equation, inner)
                results = _jax.bind(equation, [*operands, *arrays], params)
            env.write(equation.outvars, results)
        return [env.read(atom) for atom in _jax.outputs(program)]

    return _jax.retrace(run, program)


def _holds_arrays(equation: _jax.Equation) -> bool:
    if not (_jax.is_jit(equation) or _jax.is_manual_region(equation)):
        return False
    inner = equation.params["jaxpr"]
    return bool(_jax.constants(inner)) or any(map(_holds_arrays, _jax.equations(inner)))
