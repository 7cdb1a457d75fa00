# SPDX-License-Identifier: Apache-2.0
"""Do the matmuls inside ``ts.autocast`` in its dtype."""

import re
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from tessera import _jax
from tessera.casts import AUTOCAST_DTYPES, AUTOCAST_OFF, AUTOCAST_SCOPE
from tessera.compiler import rewriting
from tessera.compiler.ir import Graph
from tessera.primitive_properties import CONTRACTIONS

_SCOPE = re.compile(
    rf"\b{AUTOCAST_SCOPE}({'|'.join((AUTOCAST_OFF, *AUTOCAST_DTYPES))})\b"
)


def autocast_matmuls(graph: Graph) -> Graph:
    """Cast the operands of matmuls written under ``ts.autocast``. Numerics: changed.

    An equation is inside by its name scope, which differentiation keeps, so backward
    matmuls are cast as their forward ones. Accumulation and result stay in f32.

    Before:  y:f32 = dot_general x:f32 w:f32                  (in autocast_bfloat16)
    After:   a:bf16 = convert x; b:bf16 = convert w
             y:f32 = dot_general[preferred_element_type=f32] a b

    Source: Micikevicius et al., Mixed Precision Training, arXiv 1710.03740.
    """

    def cast(
        equation: _jax.Equation, operands: Sequence[Any], scopes: str
    ) -> list[Any]:
        dtype = jnp.dtype(_dtype_of(scopes))
        with _jax.source_context(equation):
            # Of a ragged dot the third operand is the sizes of its groups.
            narrowed = [operand.astype(dtype) for operand in operands[:2]]
        result = equation.outvars[0].aval.dtype
        params = dict(equation.params, preferred_element_type=result)
        return _jax.bind(equation, [*narrowed, *operands[2:]], params)

    return graph.with_program(rewriting.rewrite(graph.program, _is_inside, cast))


def _dtype_of(scopes: str) -> str:
    found = _SCOPE.findall(scopes)
    return found[-1] if found else AUTOCAST_OFF


def _is_inside(equation: _jax.Equation, scopes: str) -> bool:
    name = equation.primitive.name
    if name not in CONTRACTIONS or _dtype_of(scopes) == AUTOCAST_OFF:
        return False
    return all(atom.aval.dtype == jnp.float32 for atom in equation.invars[:2])
