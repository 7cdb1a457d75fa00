# SPDX-License-Identifier: Apache-2.0
"""Programs are checked whole, though equations that are alike are inferred once."""

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import pytest

from tessera.jax_compat import jaxprs

X = jax.ShapeDtypeStruct((3,), jnp.float32)


def deep(x):
    for _ in range(5):
        x = jnp.sin(x) * 2.0
    return x, jnp.concatenate([x, x])


def broken(change, function=deep):
    """The program with other equations, which ``change`` gives."""
    program = jax.make_jaxpr(function)(X)
    body = getattr(program, "jaxpr", program)
    return jex.ClosedJaxpr(body.replace(eqns=change(list(body.eqns))), ())


def test_a_program_of_jax_is_well_formed():
    jaxprs.check(jax.make_jaxpr(deep)(X))


def test_equations_of_one_kind_are_inferred_once(monkeypatch):
    sizes = []
    monkeypatch.setattr(jex, "check_jaxpr", lambda body: sizes.append(len(body.eqns)))
    jaxprs.check(jax.make_jaxpr(deep)(X))
    assert sizes == [3]  # sin, mul, concatenate


def wrongly_typed(equations):
    """The last but one takes a result of another shape than it says."""
    last = equations[-1]
    sin = equations[-3]
    return [*equations, sin.replace(invars=last.outvars, outvars=[fresh(sin)])]


def fresh(equation):
    """A variable that no equation binds, of the type of an equation's result."""
    variable = jaxprs.equations(jax.make_jaxpr(lambda x: jnp.cos(x))(X))[0].outvars[0]
    assert variable.aval == equation.outvars[0].aval
    return variable


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: [e[1], e[0], *e[2:]], "not defined"),
        (lambda e: e[1:], "not defined"),
        (lambda e: [*e, e[4]], "already bound"),
        (lambda e: e[:-1], "not defined"),
        (wrongly_typed, "inconsistently typed"),
    ],
    ids=["out of order", "unbound", "bound twice", "no such output", "another type"],
)
def test_a_program_that_is_not_well_formed_is_refused(change, message):
    with pytest.raises(Exception, match=message):
        jaxprs.check(broken(change))


def test_effects_of_equations_are_checked_too():
    def printing(x):
        jax.debug.print("{}", x)
        return deep(x)

    def without_effects(equations):
        return [e.replace(effects=frozenset()) for e in equations]

    jaxprs.check(jax.make_jaxpr(printing)(X))
    with pytest.raises(Exception, match="effects"):
        jaxprs.check(broken(without_effects, printing))
