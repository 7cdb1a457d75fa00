# SPDX-License-Identifier: Apache-2.0
"""Carry declared layouts to the outputs that plainly have them."""

from dataclasses import replace

from jax.sharding import NamedSharding

from tessera import _jax
from tessera.graph.ir import Graph


def assign_output_layouts(graph: Graph) -> Graph:
    """Declare the layout of outputs that are inputs or constrained. Numerics: exact.

    What is declared is checked against the compiled program, so this extends the
    check to gradients, which are constrained to the layout of their weights.

    Before:  g = sharding_constraint[P('tp')] h; out g over undeclared
    After:   the same equations; out g over P('tp')
    """
    if graph.mesh is None:
        return graph
    known = {
        variable: value.spec
        for variable, value in zip(
            _jax.inputs(graph.program), graph.inputs, strict=True
        )
    }
    for equation in _jax.equations(graph.program):
        sharding = equation.params.get("sharding")
        if equation.primitive.name == "sharding_constraint" and isinstance(
            sharding, NamedSharding
        ):
            known[equation.outvars[0]] = sharding.spec
    return graph.with_outputs(
        [
            value
            if value.spec is not None or isinstance(atom, _jax.Literal)
            else replace(value, spec=known.get(atom))
            for atom, value in zip(
                _jax.outputs(graph.program), graph.outputs, strict=True
            )
        ]
    )
