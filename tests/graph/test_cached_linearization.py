# SPDX-License-Identifier: Apache-2.0
"""Equal equations are differentiated once, and each keeps what is its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive

import tessera as ts
from tessera.graph import differentiation
from tessera.graph.cached_linearization import CachedLinearization
from tessera.jax_compat import jaxprs

X = jnp.linspace(-1.0, 1.0, 6, dtype=jnp.float32).reshape(2, 3)
W = jnp.linspace(0.5, 2.0, 9, dtype=jnp.float32).reshape(3, 3)

scale_p = Primitive("scale")
scale_p.def_abstract_eval(lambda x, *, by: x)
scale_p.def_impl(lambda x, *, by: x * by)


@pytest.fixture
def plain(monkeypatch):
    """A context in which JAX differentiates every equation by itself."""

    class Plain:
        bind = staticmethod(jaxprs.bind)

    def patch():
        monkeypatch.setattr(differentiation, "CachedLinearization", Plain)

    return patch


def loss(w, x):
    with jax.named_scope("net"), ts.autocast("bf16"):
        for _ in range(3):
            x = jnp.where(x > 0, jax.nn.softmax(x @ w) - 0.1, jnp.sin(x))
    return jnp.sum(x**2) + jnp.mean(jnp.exp(w)) ** 3


def traced(w, x):
    return ts.function(lambda w, x: ts.grad(loss(w, x), w)).trace(w, x)


def described(program):
    """What each equation is, in no order: JAX adds cotangents up early or late."""
    return sorted(
        (
            equation.primitive.name,
            [str(atom.aval) for atom in (*equation.invars, *equation.outvars)],
            jaxprs.name_scopes(equation),
            jaxprs.source_line(equation),
        )
        for equation in jaxprs.equations(program)
    )


@pytest.mark.full
def test_the_program_is_the_one_of_differentiating_every_equation(plain):
    found = traced(W, X).graph.program
    plain()
    wanted = traced(W, X).graph.program
    assert described(found) == described(wanted)
    with jax.disable_jit():
        got, want = (jaxprs.evaluate(each, W, X)[0] for each in (found, wanted))
    np.testing.assert_array_equal(got, want)


def test_equal_equations_are_one_program():
    program = jax.make_jaxpr(lambda x: jnp.sin(jnp.sin(x)) + jnp.cos(x))(X)
    first, second, cos, _ = jaxprs.equations(program)
    equations = CachedLinearization()
    programs = [equations._program(e, [X]) for e in (first, second, cos, first)]
    assert programs[0] is programs[1] is programs[3]
    assert programs[0] is not programs[2]
    assert equations._program(first, [X[0]]) is None  # it says another shape


def test_parameters_that_are_equal_and_not_the_same_are_told_apart():
    def function(x):
        return scale_p.bind(x, by=0.0), scale_p.bind(x, by=-0.0)

    equations = CachedLinearization()
    one = jnp.ones(())
    found = [
        float(equations.bind(equation, [one])[0])
        for equation in jaxprs.equations(jax.make_jaxpr(function)(one))
    ]
    np.testing.assert_array_equal(np.signbit(found), [False, True])


def test_settings_around_an_equation_are_its_own():
    def function(x):
        with jax.default_matmul_precision("highest"):
            exact = x @ x
        return exact + x @ x

    (first, second, _) = jaxprs.equations(jax.make_jaxpr(function)(W))
    equations = CachedLinearization()
    programs = [equations._program(e, [W, W]) for e in (first, second)]
    assert programs[0] is not programs[1]


def test_equations_with_programs_or_effects_are_left_alone():
    def function(x):
        jax.debug.print("{}", x)
        return jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x)

    equations = CachedLinearization()
    named = {e.primitive.name: e for e in jaxprs.equations(jax.make_jaxpr(function)(X))}
    for name in ("debug_print", "cond"):
        equation = named[name]
        assert equations._program(equation, [X] * len(equation.invars)) is None
