# SPDX-License-Identifier: Apache-2.0
"""A primitive that stands for an equation, whose linearization JAX derives once.

Beside ``jaxprs``: like it, this module may use ``jax._src``.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import jax.extend.core as jex
from jax._src import core, source_info_util
from jax._src.interpreters import ad, partial_eval

# In newer versions rules also give and take residuals of nested programs.
_NESTED_RESIDUALS = [None] * hasattr(ad, "linearize_on_zero_tangents")

inlined_p = jex.Primitive("inlined")
"""Records the equations of its parameter ``program``; there has to be a trace."""

inlined_p.multiple_results = True


def key(equation: Any) -> Hashable | None:
    """Equal for equations with one linearization; None of an equation that shares none.

    Floats may be equal and not the same: 0.0 and -0.0.
    """
    params = equation.params
    if any(isinstance(value, float) for value in params.values()):
        return None
    types = tuple(atom.aval for atom in equation.invars)
    found = (equation.primitive, tuple(params.items()), types, equation.ctx)
    try:
        hash(found)
    except TypeError:
        return None
    return found


def of_one_equation(equation: Any) -> Any:
    """The program of one equation, without its name scopes."""
    operands = [jex.Var(atom.aval) for atom in equation.invars]
    results = [jex.Var(variable.aval) for variable in equation.outvars]
    info = equation.source_info.replace(name_stack=source_info_util.NameStack())
    alone = equation.replace(invars=operands, outvars=results, source_info=info)
    names = core.DebugInfo("equation", equation.primitive.name, None, None)
    body = jex.Jaxpr([], operands, results, [alone], debug_info=names)
    return jex.ClosedJaxpr(body, ())


def _record(trace: Any, here: Any, *values: Any, program: Any) -> list[Any]:
    """Record the equations of a program in a trace, at a line and in its scopes."""
    body = getattr(program, "jaxpr", program)
    operands = [trace.to_jaxpr_tracer(value, here) for value in values]
    return partial_eval.inline_jaxpr_into_trace(
        trace, here, body, program.consts, *operands
    )


def _record_here(program: Any, values: Sequence[Any]) -> list[Any]:
    with core.take_current_trace() as trace:
        return _record(trace, source_info_util.current(), *values, program=program)


def _linearize(
    is_vjp: bool, is_nonzero: Sequence[bool], *primals: Any, program: Any
) -> tuple[Any, ...]:
    """What JAX's rule for ``jit`` does, without its layouts and donation."""
    known, _, results_nonzero, forwarded, linear = ad.linearize_jaxpr(
        program, is_nonzero, is_vjp=is_vjp
    )
    results = _record_here(known, primals)
    count = len(results_nonzero)
    saved = iter(results[count:])
    residuals = [next(saved) if i is None else primals[i] for i in forwarded]

    def tangents_of(residuals: Sequence[Any], *rest: Any) -> list[Any]:
        tangents = rest[len(_NESTED_RESIDUALS) :]
        pairs = zip(tangents, is_nonzero, strict=True)
        nonzero = [tangent for tangent, there in pairs if there]
        found = iter(_record_here(linear, [*residuals, *nonzero]))
        return [
            next(found) if there else ad.Zero(aval.to_tangent_aval())
            for there, aval in zip(results_nonzero, program.out_avals, strict=True)
        ]

    outputs = results[:count]
    return outputs, results_nonzero, residuals, *_NESTED_RESIDUALS, tangents_of


partial_eval.custom_staging_rules[inlined_p] = _record
ad.primitive_linearizations[inlined_p] = _linearize
