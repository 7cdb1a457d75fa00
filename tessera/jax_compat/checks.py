# SPDX-License-Identifier: Apache-2.0
"""Checks that programs are well formed, in time that does not grow with repetition.

Beside ``jaxprs``: like it, this module may use ``jax._src``.
"""

from collections.abc import Iterable
from typing import Any

import jax.extend.core as jex
from jax._src import config, core


def check(program: Any) -> None:
    """Raise JAX's own error when a program is not well formed.

    JAX infers the types of every equation again, which takes about as long as tracing
    it. Equal equations on equal types have equal results, so one of each kind will do.
    """
    body = getattr(program, "jaxpr", program)
    is_subtle = body.effects or config.debug_key_reuse.value
    kinds = None if is_subtle else _one_of_each_kind(body)
    jex.check_jaxpr(body if kinds is None else kinds)


def _one_of_each_kind(body: Any) -> Any | None:
    """A jaxpr of equations that differ; None if a variable is not bound once, before.

    It takes what none of its equations computes.
    """
    bound, kinds = {*body.constvars, *body.invars}, dict[Any, Any]()
    for equation in body.eqns:
        results = [v for v in equation.outvars if not isinstance(v, core.DropVar)]
        is_bound = all(v in bound for v in _variables(equation.invars))
        if not is_bound or not bound.isdisjoint(results):
            return None
        bound.update(results)
        kinds.setdefault(_kind(equation), equation)
    if not all(v in bound for v in _variables(body.outvars)):
        return None
    few = list(kinds.values())
    made = {v for equation in few for v in equation.outvars}
    read = dict.fromkeys(v for equation in few for v in _variables(equation.invars))
    given = [v for v in read if v not in made]
    names = body.debug_info.with_unknown_names()
    return jex.Jaxpr([], given, [], few, debug_info=names)


def _kind(equation: Any) -> Any:
    """What decides the types of an equation's results."""
    types = tuple(atom.aval for atom in (*equation.invars, *equation.outvars))
    params = tuple(equation.params.items())
    kind = (equation.primitive, params, len(equation.invars), types, equation.ctx)
    try:
        hash(kind)
    except TypeError:
        return id(equation)  # one of its own
    return kind


def _variables(atoms: Iterable[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, jex.Literal)]
