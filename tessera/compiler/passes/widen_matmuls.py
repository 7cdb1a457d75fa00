# SPDX-License-Identifier: Apache-2.0
"""Give weight gradients f32 results, and narrow matmuls on CPU f32 operands."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

import jax.numpy as jnp

from tessera import _jax
from tessera.casts import PARAMETER_CAST
from tessera.compiler import rewriting
from tessera.compiler.ir import Graph
from tessera.primitive_properties import CONTRACTIONS, COPIES, PLACEMENTS, RESHAPES

_MOVES: Final = COPIES | PLACEMENTS | RESHAPES
_NARROW: Final = (jnp.bfloat16, jnp.float16)


def widen_matmuls(graph: Graph) -> Graph:
    """Keep the f32 sums of matmuls whose rounding nothing needs. Numerics: changed.

    A parameter that is cast where it is used has a gradient that JAX rounds to the
    dtype of the cast, and casts back. Devices would add up rounded numbers. Here the
    matmul's result stays f32 on its way to the parameter.

    Before:  g:bf16 = dot_general x:bf16 dy:bf16
             h:bf16 = transpose g
             w:f32 = convert h                              (of a parameter's cast)
    After:   g:f32 = dot_general[preferred_element_type=f32] x dy
             w:f32 = transpose g

    On CPU narrow operands are cast to f32, which is exact, and narrow results rounded:
    XLA's CPU compiler accepts every narrow matmul with an f32 result and then refuses
    some of them at run time ("Unsupported element type for DotThunk", JAX 0.10.2).

    Source: Micikevicius et al., Mixed Precision Training, arXiv 1710.03740.
    """
    on_cpu = graph.platform == "cpu"
    widened = set(map(id, _gradients(graph.program, "")))

    def is_rewritten(equation: _jax.Equation, scopes: str) -> bool:
        return id(equation) in widened or (on_cpu and _is_narrow(equation))

    def apply(
        equation: _jax.Equation, operands: Sequence[Any], scopes: str
    ) -> list[Any]:
        is_widened = id(equation) in widened
        if equation.primitive.name == "convert_element_type" and is_widened:
            return [operands[0]]
        if equation.primitive.name not in CONTRACTIONS:
            return _jax.bind(equation, operands)
        with _jax.source_context(equation):
            return [_product(equation, operands, is_widened, on_cpu)]

    return graph.with_program(rewriting.rewrite(graph.program, is_rewritten, apply))


def _product(
    equation: _jax.Equation, operands: Sequence[Any], is_widened: bool, on_cpu: bool
) -> Any:
    params, result = dict(equation.params), equation.outvars[0].aval.dtype
    if is_widened or on_cpu:
        params["preferred_element_type"] = jnp.dtype(jnp.float32)
    if on_cpu:
        # Of a ragged dot the third operand is the sizes of its groups.
        wide = [operand.astype(jnp.float32) for operand in operands[:2]]
        operands = [*wide, *operands[2:]]
    (product,) = _jax.bind(equation, operands, params)
    return product if is_widened else product.astype(result)


def _is_narrow(equation: _jax.Equation) -> bool:
    return equation.primitive.name in CONTRACTIONS and all(
        atom.aval.dtype in _NARROW for atom in equation.invars[:2]
    )


def _gradients(program: _jax.Program, scopes: str) -> Iterator[_jax.Equation]:
    """The matmuls of gradients of cast parameters, and what is on the way to them."""
    equations = _jax.equations(program)
    producers = {var: each for each in equations for var in each.outvars}
    uses = rewriting.use_counts(program)
    for equation in equations:
        path = f"{scopes}/{_jax.name_scopes(equation)}"
        if _casts_gradient(equation, path):
            yield from _chain(equation, producers, uses)
        for inner in _jax.inner_programs(equation):
            yield from _gradients(inner, path)


def _casts_gradient(equation: _jax.Equation, scopes: str) -> bool:
    is_cast = equation.primitive.name == "convert_element_type"
    if not is_cast or PARAMETER_CAST not in scopes:
        return False
    source, result = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
    return source in _NARROW and result == jnp.float32


def _chain(
    cast: _jax.Equation, producers: dict[Any, _jax.Equation], uses: Counter[Any]
) -> list[_jax.Equation]:
    """The equations from a matmul to a cast, if nothing else uses its result."""
    chain = [cast]
    while True:
        (var, *_) = chain[-1].invars
        producer = producers.get(var)
        if producer is None or uses[var] > 1:
            return []
        chain.append(producer)
        if producer.primitive.name in CONTRACTIONS:
            return chain
        if producer.primitive.name not in _MOVES or len(producer.outvars) > 1:
            return []
