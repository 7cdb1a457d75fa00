# SPDX-License-Identifier: Apache-2.0
"""What ``ts.autocast`` does with each primitive: one table, by its name.

``docs/reference/autocast.md`` has the same table; a test compares the two.
"""

import re
from collections.abc import Mapping
from enum import Enum
from functools import lru_cache
from typing import Any, Final

import jax.numpy as jnp

from tessera.foundations.primitive_properties import (
    BROADCASTS,
    CALLS,
    CONTRACTIONS,
    COPIES,
    PLACEMENTS,
    RESHAPES,
    SLICES,
)
from tessera.jax_compat import jaxprs, primitives, traces
from tessera.tracing.casts import AUTOCAST_DTYPES, AUTOCAST_OFF, AUTOCAST_SCOPE


class Rule(Enum):
    """How a primitive treats f32 operands that have narrow values."""

    MATMUL = "narrow operands, accumulated in f32"
    MOVE = "moves values of any dtype"
    NARROW = "narrow if its f32 operands are"
    POWER = "narrow in bf16, f32 in f16"
    INSIDE = "by the operations inside"
    F32 = "f32"


CUSTOM_CALLS: Final = frozenset(
    ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")
)
"""Calls with a derivative of their own, which is for f32: so is their boundary."""

PAIRWISE: Final = COPIES | PLACEMENTS
"""Primitives whose result i is operand i."""

_ARITHMETIC: Final = frozenset(
    """
    abs add add_any ceil clamp div erf erfc floor logistic max min mul neg
    one_minus_square round sign sub tanh
    """.split()  # noqa: SIM905
)

SINGLE_INSTRUCTIONS: Final = _ARITHMETIC - frozenset(
    ("erf", "erfc", "logistic", "one_minus_square", "tanh")
)
"""Arithmetic that XLA does not expand into several steps, each of them rounded."""

RULES: Final[Mapping[str, Rule]] = {
    **dict.fromkeys(CONTRACTIONS, Rule.MATMUL),
    **dict.fromkeys(
        PAIRWISE | RESHAPES | BROADCASTS | SLICES | {"gather", "select_n"}, Rule.MOVE
    ),
    **dict.fromkeys(_ARITHMETIC, Rule.NARROW),
    **dict.fromkeys(("integer_pow", "square"), Rule.POWER),
    **dict.fromkeys((CALLS - CUSTOM_CALLS) | {"scan"}, Rule.INSIDE),
}
"""The rule of each primitive; one that is not here runs in f32."""

_SCOPE: Final = re.compile(
    rf"\b{AUTOCAST_SCOPE}({'|'.join((AUTOCAST_OFF, *AUTOCAST_DTYPES))})\b"
)


@lru_cache(maxsize=4096)
def autocast_dtype(scopes: str) -> Any:
    """The dtype of the innermost autocast in a path of name scopes, or None."""
    found = _SCOPE.findall(scopes)
    is_off = not found or found[-1] == AUTOCAST_OFF
    return None if is_off else jnp.dtype(found[-1])


def rule_of(equation: jaxprs.Equation, dtype: Any) -> Rule:
    """The rule of an equation inside an autocast to ``dtype``, None for outside.

    Moving values is the same everywhere; arithmetic outside is in f32.
    """
    rule = RULES.get(equation.primitive.name, Rule.F32)
    match rule:
        case Rule.MATMUL:
            is_narrow = dtype is not None and all(map(is_f32, equation.invars[:2]))
            return rule if is_narrow else Rule.F32
        case Rule.MOVE:
            # What a gather fills in may have no narrow number; the default is NaN.
            return Rule.F32 if primitives.fills_in(equation) else rule
        case Rule.NARROW:
            return Rule.F32 if dtype is None else rule
        case Rule.POWER:
            is_reciprocal = primitives.exponent(equation) < 0
            is_narrow = dtype == jnp.bfloat16 and not is_reciprocal
            return Rule.NARROW if is_narrow else Rule.F32
    return rule


def is_f32(atom: jaxprs.Atom) -> bool:
    """Whether a variable or literal is an array of f32; mutable arrays are none."""
    is_f32 = getattr(atom.aval, "dtype", None) == jnp.float32
    return is_f32 and not traces.is_reference(atom.aval)
