# SPDX-License-Identifier: Apache-2.0
"""Derivative rules that close over traced values, or give other shapes, are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tessera as ts
from tessera import graph
from tessera.errors import OutsideTraceError, UndifferentiableError
from tessera.mesh import Mesh

V, X = jnp.float32(1.3), jnp.float32(0.7)


def by_vjp(v):
    @jax.custom_vjp
    def wave(x):
        return jnp.sin(v * x)

    wave.defvjp(
        lambda x: (jnp.sin(v * x), x), lambda x, slope: (slope * v * jnp.cos(v * x),)
    )
    return wave


def by_jvp(v):
    @jax.custom_jvp
    def wave(x):
        return jnp.sin(v * x)

    @wave.defjvp
    def rule(primals, tangents):
        (x,), (slope,) = primals, tangents
        return jnp.sin(v * x), slope * v * jnp.cos(v * x)

    return wave


RULES = {"vjp": by_vjp, "jvp": by_jvp}
BODIES = {
    "plain": lambda wave, x: wave(x),
    "jit": lambda wave, x: jax.jit(wave)(x),
    "scan": lambda wave, x: jax.lax.scan(
        lambda c, _: (wave(c), None), x, None, length=2
    )[0],
    "branch": lambda wave, x: jax.lax.cond(x > 0, wave, lambda x: x, x),
    "remat": lambda wave, x: jax.checkpoint(wave)(x),
    "vmap": lambda wave, x: jax.vmap(wave)(jnp.stack([x, 2.0 * x])).sum(),
}
BOTH = pytest.mark.parametrize("rule", RULES)
EVERYWHERE = pytest.mark.parametrize("body", BODIES)
refused = pytest.raises(OutsideTraceError, match=r"T302.* closes over a traced value")


@BOTH
@EVERYWHERE
@pytest.mark.parametrize("order", ["x", "v", "xv"])
def test_a_gradient_through_such_a_rule_is_refused(rule, body, order):
    """Where a part was dropped, the rest was a plausible number."""

    @ts.function
    def slope(v, x):
        value = v * x + BODIES[body](RULES[rule](v), x)
        for name in order:
            value = ts.grad(value, {"v": v, "x": x}[name], allow_unused=True)
        return value

    with refused:
        slope(V, X)


@BOTH
@EVERYWHERE
def test_a_rule_may_close_over_an_array(rule, body):
    wave = RULES[rule](np.float32(1.3))

    def loss(x):
        return BODIES[body](wave, x)

    slope = ts.function(lambda x: ts.grad(loss(x), x))
    np.testing.assert_allclose(slope(X), jax.grad(loss)(X), rtol=1e-5)


@BOTH
def test_jax_differentiates_such_a_rule_inside_a_function(rule):
    def loss(v, x):
        return RULES[rule](v)(x)

    def slope(v, x):
        return jax.grad(loss, 1)(v, x)

    found = ts.function(lambda v, x: ts.grad(slope(v, x), v))(V, X)
    np.testing.assert_allclose(found, jax.grad(slope)(V, X), rtol=1e-5)


def test_a_stage_with_such_a_rule_is_refused():
    mesh = Mesh(["pp"], devices=range(2))

    def first(w, x):
        return by_vjp(w)(x)

    stages = [graph.stage("first")(first), graph.stage("second")(lambda w, x: w * x)]

    def chain(w, x):
        return stages[1](w, stages[0](w, x))

    piped = graph.pipeline(stages=stages, mesh=mesh, microbatches=2, batch=["x"])(chain)
    step = ts.function(lambda w, x: ts.grad(piped(w, x).sum(), w), mesh=mesh)
    with refused:
        step(V, jnp.ones((4, 2)))


def test_a_rule_that_gives_a_gradient_of_another_shape_is_refused():
    """Without this option of its own, JAX says so itself."""

    @jax.custom_vjp
    def first(x, y):
        return x

    first.defvjp(lambda x, y: (x, None), lambda _, slope: (slope, jnp.zeros(3)))

    @ts.function
    def step(x, y):
        return ts.grad(jnp.sum(first(x, y)), y)

    jax.config.update("jax_disable_bwd_checks", True)
    try:
        with pytest.raises(UndifferentiableError) as caught:
            step(jnp.ones(3), jnp.ones(4))
    finally:
        jax.config.update("jax_disable_bwd_checks", False)
    line = step.body.__code__.co_firstlineno + 2
    assert str(caught.value) == (
        "[T317] a derivative rule gives a gradient of another shape than its "
        "argument's\n"
        "  got: shape (3,) for a weight of shape (4,)\n"
        f"  got: ts.grad was called at {__file__}:{line}\n"
        "  fix: return a gradient of the shape of each argument from the rule\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T317.html"
    )
