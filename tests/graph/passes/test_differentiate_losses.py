# SPDX-License-Identifier: Apache-2.0
"""Gradients of what was already computed: equal to jax.grad, and no dearer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import tessera as ts
from tessera.errors import UnconnectedGradientError
from tessera.graph.passes.differentiate_losses import differentiate_losses
from tessera.jax_compat import jaxprs
from tests.graph.passes.gradient_programs import (
    W,
    X,
    assert_same,
    count,
    loss_of,
)

# --- what can be differentiated by what


def test_the_loss_and_its_gradient_share_one_forward_run():
    def step(w, x):
        loss = loss_of(w, x)
        return loss, ts.grad(loss, w)

    assert_same(step, jax.value_and_grad(loss_of), W, X)


def test_several_weights_at_once():
    def step(w, x):
        return ts.grad(loss_of(w, x), (w, x))

    assert_same(step, jax.grad(loss_of, argnums=(0, 1)), W, X)


def test_an_intermediate_value():
    def step(w, x):
        hidden = x @ w
        return ts.grad(jnp.sum(jnp.tanh(hidden) ** 2), hidden)

    def reference(w, x):
        return jax.grad(lambda hidden: jnp.sum(jnp.tanh(hidden) ** 2))(x @ w)

    assert_same(step, reference, W, X)


def test_a_value_and_another_that_was_computed_from_it():
    def step(w, x):
        hidden = x @ w
        loss = jnp.sum(jnp.tanh(hidden) ** 2) + jnp.sum(w**3)
        found = ts.grad(loss, {"w": w, "hidden": hidden, "loss": loss})
        return found, hidden

    def reference(w, x):
        def forward(w, offset):
            hidden = x @ w + offset
            return jnp.sum(jnp.tanh(hidden) ** 2) + jnp.sum(w**3), hidden

        by_w, by_hidden = jax.grad(forward, argnums=(0, 1), has_aux=True)(
            w, jnp.zeros((8, 3))
        )[0]
        found = {"w": by_w, "hidden": by_hidden, "loss": jnp.float32(1)}
        return found, x @ w

    found, expected = ts.function(step)(W, X), reference(W, X)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected
    )
    assert count(ts.function(step).trace(W, X).graph.program) == 2


def test_a_weight_does_not_stand_in_the_way_of_the_one_that_it_came_from():
    alone = ts.function(lambda w, x: ts.grad(loss_of(w * 2.0, x), w))

    def step(w, x):
        doubled = w * 2.0
        return ts.grad(loss_of(doubled, x), [w, doubled])

    np.testing.assert_allclose(ts.function(step)(W, X)[0], alone(W, X), rtol=1e-6)


def test_values_of_the_forward_run_are_used_on_after_the_gradient():
    def step(w, x):
        hidden = x @ w
        activated = jnp.tanh(hidden)
        loss = jnp.sum(activated**2)
        by_w = ts.grad(loss, w)
        return hidden, activated * 2.0, jnp.sin(loss), by_w, w - 0.1 * by_w

    def reference(w, x):
        def forward(w):
            hidden = x @ w
            activated = jnp.tanh(hidden)
            return jnp.sum(activated**2), (hidden, activated)

        (loss, (hidden, activated)), by_w = jax.value_and_grad(forward, has_aux=True)(w)
        return hidden, activated * 2.0, jnp.sin(loss), by_w, w - 0.1 * by_w

    assert_same(step, reference, W, X)


@pytest.mark.parametrize(
    "call",
    [
        jax.jit(lambda y, z: (y * 2.0, z * 3.0)),
        jax.checkpoint(lambda y, z: (y * 2.0, z * 3.0)),
        lambda y, z: lax.scan(
            lambda c, _: ((c[0] * 2.0, c[1] * 3.0), None), (y, z), None, length=2
        )[0],
        lambda y, z: lax.cond(
            True, lambda y, z: (y * 2.0, z * 3.0), lambda y, z: (y, z), y, z
        ),
    ],
    ids=["jit", "checkpoint", "scan", "cond"],
)
def test_a_call_may_compute_more_from_the_weights_than_what_leads_to_the_loss(call):
    def results(w, x):
        return call(x @ w, jnp.sin(w))

    def step(w, x):
        first, second = results(w, x)
        return ts.grad(jnp.sum(jnp.tanh(first)), w), second

    def reference(w, x):
        def loss(w):
            first, second = results(w, x)
            return jnp.sum(jnp.tanh(first)), second

        return jax.grad(loss, has_aux=True)(w)

    assert_same(step, reference, W, X)


def test_two_losses_of_one_forward_run():
    def step(w, x):
        hidden = jnp.tanh(x @ w)
        first, second = jnp.sum(hidden**2), jnp.sum(hidden**3)
        return ts.grad(first, w), ts.grad(second, w)

    def reference(w, x):
        _, pull = jax.vjp(
            lambda w: (
                jnp.sum(jnp.tanh(x @ w) ** 2),
                jnp.sum(jnp.tanh(x @ w) ** 3),
            ),
            w,
        )
        one, zero = jnp.float32(1), jnp.float32(0)
        return pull((one, zero))[0], pull((zero, one))[0]

    found, expected = ts.function(step)(W, X), reference(W, X)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    # One forward matmul for both, one backward for each.
    assert count(ts.function(step).trace(W, X).graph.program) == 3


def test_a_loss_that_another_loss_contains():
    def step(w, x):
        first = loss_of(w, x)
        second = first**2 + jnp.sum(w)
        return ts.grad(first, w), ts.grad(second, w), ts.grad(second, first)

    def reference(w, x):
        first = loss_of(w, x)
        return (
            jax.grad(loss_of)(w, x),
            jax.grad(lambda w: loss_of(w, x) ** 2 + jnp.sum(w))(w),
            2 * first,
        )

    found = ts.function(step)(W, X)
    for a, b in zip(found, reference(W, X), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_gradients_of_gradients():
    def step(w, x):
        loss = loss_of(w, x)
        first = ts.grad(loss, w)
        second = ts.grad(jnp.sum(first**2), w)
        third = ts.grad(jnp.sum(second**2) + loss, w)
        return loss, first, second, third

    def reference(w, x):
        first = jax.grad(loss_of)
        second = jax.grad(lambda w: jnp.sum(first(w, x) ** 2))
        third = jax.grad(lambda w: jnp.sum(second(w) ** 2) + loss_of(w, x))
        return loss_of(w, x), first(w, x), second(w), third(w)

    found = ts.function(step)(W, X)
    for a, b in zip(found, jax.jit(reference)(W, X), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_a_gradient_by_a_gradient():
    def step(w, x):
        first = ts.grad(loss_of(w, x), w)
        return ts.grad(jnp.sum(first**3), first)

    def reference(w, x):
        return 3 * jax.grad(loss_of)(w, x) ** 2

    assert_same(step, reference, W, X)


def test_a_captured_array_and_a_captured_scalar():
    scale = jnp.float32(3)
    step = ts.function(lambda x: ts.grad(jnp.sum(x @ W * scale), [W, scale]))
    expected = jax.grad(lambda w, s: jnp.sum(X @ w * s), argnums=(0, 1))(W, scale)
    for a, b in zip(step(X), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_one_weight_given_twice():
    step = ts.function(lambda w, x: ts.grad(loss_of(w, x), [w, w]))
    first, second = step(W, X)
    np.testing.assert_array_equal(first, second)


def test_a_loss_by_itself():
    assert ts.function(lambda x: ts.grad(y := jnp.sum(x), y))(X) == 1.0


def in_pairs(a, b):
    """Two results, each of one operand."""
    return jnp.sin(a), 2.0 * b


# A program is a list of steps: an operation, and which two earlier values it takes.
# An operation gives one value or several.
OPERATIONS = [
    lambda a, b: (a * b,),
    lambda a, b: (a + 2.0 * b,),
    lambda a, b: (jnp.sin(a),),
    lambda a, b: (jnp.tanh(a) * b,),
    lambda a, b: (lax.cond(a[0] > 0, lambda: a * b, lambda: b),),
    lambda a, b: lax.cond(a[0] > 0, in_pairs, lambda a, b: (a, b), a, b),
    lambda a, b: (lax.scan(lambda c, _: (jnp.cos(c) * b, None), a, None, length=2)[0],),
    lambda a, b: lax.scan(lambda c, _: (in_pairs(*c), None), (a, b), None, length=2)[0],
    lambda a, b: (lax.stop_gradient(a) * b,),
    lambda a, b: jax.jit(in_pairs)(a, b),
    lambda a, b: jax.checkpoint(in_pairs)(a, b),
]
STEPS = st.lists(
    st.tuples(
        st.integers(0, len(OPERATIONS) - 1), st.integers(0, 9), st.integers(0, 9)
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.full
@settings(max_examples=15)
@given(STEPS, st.sets(st.integers(0, 7), min_size=1, max_size=3))
def test_any_values_of_any_program(steps, chosen):
    def run(x, y, offsets):
        values = [x + offsets[0], y + offsets[1]]
        for operation, a, b in steps:
            taken = values[a % len(values)], values[b % len(values)]
            for result in OPERATIONS[operation](*taken):
                values.append(result + offsets[len(values)])
        return jnp.sum(values[-1]), values

    start = jnp.array([0.3, -0.7]), jnp.array([0.5, 0.2])
    most = [jnp.zeros(2)] * (2 + 2 * len(steps))
    zeros = most[: len(run(*start, most)[1])]
    wanted = sorted({place % len(zeros) for place in chosen})

    def step(x, y):
        loss, values = run(x, y, [0.0] * len(zeros))
        weights = {place: values[place] for place in wanted}
        # The values are used on, so that the order of equations matters.
        gradients = ts.grad(loss, weights, allow_unused=True)
        return gradients, [value * 2.0 for value in values]

    program = ts.function(step).trace(*start).graph.program
    results = jaxprs.evaluate(program, *start)
    found, used = results[: len(wanted)], results[len(wanted) :]
    expected = jax.grad(lambda offsets: run(*start, offsets)[0])(zeros)
    for place, slope in zip(wanted, found, strict=True):
        np.testing.assert_allclose(slope, expected[place], rtol=1e-4, atol=1e-5)
    for twice, value in zip(used, run(*start, zeros)[1], strict=True):
        np.testing.assert_allclose(twice, 2.0 * value, rtol=1e-5)


# --- weights that the loss ignores


def test_a_weight_that_the_loss_ignores_is_refused_by_its_path():
    @ts.function
    def step(weights, x):
        return ts.grad(loss_of(weights["decoder"]["up"], x), weights)

    weights = {"decoder": {"up": W, "down": W}, "scale": jnp.float32(1)}
    line = step.body.__code__.co_firstlineno + 2
    with pytest.raises(UnconnectedGradientError) as caught:
        step(weights, X)
    assert str(caught.value) == (
        "[T303] the loss does not depend on 'decoder/down', 'scale'\n"
        "  got: 2 of 3 weights have no path to the loss\n"
        f"  got: ts.grad was called at {__file__}:{line}\n"
        "  fix: compute the loss from them, leave them out, or pass allow_unused=True "
        "to get zeros\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T303.html"
    )


def test_a_single_weight_that_the_loss_ignores_has_no_path():
    step = ts.function(lambda w, x: ts.grad(jnp.sum(x), w))
    with pytest.raises(UnconnectedGradientError, match="depend on the weight\n"):
        step(W, X)


def test_a_python_number_is_a_weight_that_no_loss_depends_on():
    step = ts.function(lambda x: ts.grad(jnp.sum(x) * 3.0, {"x": x, "three": 3.0}))
    with pytest.raises(UnconnectedGradientError, match="does not depend on 'three'"):
        step(X)


def test_weights_that_the_loss_ignores_may_have_zeros():
    @ts.function
    def step(w, x):
        side = w * 2.0
        loss = jnp.sum(x**2)
        weights = {"w": w, "x": x, "side": side, "three": 3.0, "half": w[0, 0] * 0.5}
        return ts.grad(loss, weights, allow_unused=True), side

    found, side = step(W, X)
    np.testing.assert_allclose(found["x"], 2 * X)
    np.testing.assert_array_equal(found["w"], jnp.zeros_like(W))
    np.testing.assert_array_equal(found["side"], jnp.zeros_like(W))
    assert found["three"] == found["half"] == 0
    np.testing.assert_array_equal(side, W * 2)


# --- the pass itself


def test_the_pass_does_nothing_twice():
    traced = ts.function(lambda w, x: ts.grad(loss_of(w, x), w)).trace(W, X)
    once = differentiate_losses(traced.origin.graph)
    assert once.program is not traced.origin.graph.program
    assert differentiate_losses(once).program is once.program


def test_a_program_without_gradients_is_left_as_it_is():
    traced = ts.function(loss_of).trace(W, X)
    assert differentiate_losses(traced.origin.graph).program is (
        traced.origin.graph.program
    )


def test_the_example_of_the_docstring():
    @ts.function
    def step(w):
        y = jnp.sin(w)
        return ts.grad(jnp.sum(y), w)

    before, after = (
        [e.primitive.name for e in jaxprs.equations(g.program)]
        for g in (step.trace(X).origin.graph, step.trace(X).graph)
    )
    assert before == ["sin", "reduce_sum", "gradient"]
    assert "gradient" not in after
    assert sorted(set(after) - {"broadcast_in_dim", "reduce_sum"}) == [
        "cos",
        "mul",
        "sin",
    ]


def test_backward_equations_carry_the_users_lines():
    traced = ts.function(lambda w, x: ts.grad(loss_of(w, x), w)).trace(W, X)
    lines = {jaxprs.source_line(e) for e in jaxprs.equations(traced.graph.program)}
    assert {line.split(":")[0] for line in lines} == {loss_of.__code__.co_filename}


def test_the_scopes_of_backward_equations_are_those_of_the_forward_ones():
    @ts.function
    def step(w, x):
        with jax.named_scope("model"):
            loss = loss_of(w, x)
        with jax.named_scope("update"):
            return ts.grad(loss, w)

    equations = jaxprs.equations(step.trace(W, X).graph.program)
    scopes = {jaxprs.name_scopes(e) for e in equations}
    assert any("transpose(jvp(model))" in scope for scope in scopes)
    assert not any("update" in scope for scope in scopes)
