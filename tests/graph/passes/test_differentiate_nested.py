# SPDX-License-Identifier: Apache-2.0
"""Gradients in loops, branches, nested functions and rules, and through them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tessera as ts
from tessera import graph
from tessera.errors import (
    UnconnectedGradientError,
    UndifferentiableError,
)
from tessera.shard import tensor
from tests.graph.passes.gradient_programs import (
    W,
    X,
    assert_same,
    loss_of,
)

# --- where the gradient may be taken


def test_inside_a_scan():
    def step(w, xs):
        def body(w, x):
            loss = loss_of(w, x)
            return w - 0.1 * ts.grad(loss, w), loss

        return lax.scan(body, w, xs)

    def reference(w, xs):
        def body(w, x):
            loss, slope = jax.value_and_grad(loss_of)(w, x)
            return w - 0.1 * slope, loss

        return lax.scan(body, w, xs)

    assert_same(step, reference, W, X.reshape(2, 4, 2))


def test_inside_a_scan_by_what_its_body_closes_over():
    def step(w, xs):
        def body(total, x):
            return total + ts.grad(loss_of(w, x), w), None

        return lax.scan(body, jnp.zeros_like(w), xs)[0]

    assert_same(step, lambda w, xs: jax.grad(loss_of)(w, X), W, X.reshape(2, 4, 2))


def test_inside_a_scan_with_a_weak_carry():
    def step(xs):
        def body(carry, x):
            return carry - 0.01 * ts.grad(jnp.sum((x * carry) ** 2), carry), None

        return lax.scan(body, 1.0, xs)[0]

    def reference(xs):
        def body(carry, x):
            slope = jax.grad(lambda c: jnp.sum((x * c) ** 2))
            return carry - 0.01 * slope(carry), None

        return lax.scan(body, 1.0, xs)[0]

    assert_same(step, reference, X)


def test_through_a_scan():
    def layers(w, x):
        return lax.scan(lambda h, _: (jnp.tanh(h @ w @ w.T), None), x, None, length=3)[
            0
        ].sum()

    assert_same(lambda w, x: ts.grad(layers(w, x), w), jax.grad(layers), W, X)


@pytest.mark.parametrize("flag", [True, False])
def test_inside_one_branch_of_a_cond(flag):
    def step(w, x, flag):
        loss = loss_of(w, x)
        return lax.cond(
            flag, lambda: ts.grad(loss_of(w, x), w), lambda: jnp.zeros_like(w) + loss
        )

    def reference(w, x, flag):
        loss = loss_of(w, x)
        return lax.cond(
            flag, lambda: jax.grad(loss_of)(w, x), lambda: jnp.zeros_like(w) + loss
        )

    assert_same(step, reference, W, X, jnp.array(flag))


def test_inside_a_while_loop():
    def step(w, x):
        def body(state):
            i, w = state
            return i + 1, w - 0.1 * ts.grad(loss_of(w, x), w)

        return lax.while_loop(lambda state: state[0] < 3, body, (0, w))[1]

    def reference(w, x):
        def body(state):
            i, w = state
            return i + 1, w - 0.1 * jax.grad(loss_of)(w, x)

        return lax.while_loop(lambda state: state[0] < 3, body, (0, w))[1]

    assert_same(step, reference, W, X)


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint], ids=["jit", "remat"])
def test_inside_a_nested_function(wrap):
    def step(w, x):
        return wrap(lambda w, x: ts.grad(loss_of(w, x), w))(w, x)

    def reference(w, x):
        return wrap(lambda w, x: jax.grad(loss_of)(w, x))(w, x)

    assert_same(step, reference, W, X)


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint], ids=["jit", "remat"])
def test_through_a_nested_function(wrap):
    def step(w, x):
        return ts.grad(wrap(loss_of)(w, x), w)

    assert_same(step, lambda w, x: jax.grad(wrap(loss_of))(w, x), W, X)


def test_through_a_users_derivative_rule():
    clipped = jax.custom_vjp(loss_of)
    clipped.defvjp(
        lambda w, x: (loss_of(w, x), (w, x)),
        lambda kept, g: (jnp.clip(jax.grad(loss_of)(*kept), -0.1, 0.1) * g, None),
    )
    assert_same(lambda w, x: ts.grad(clipped(w, x), w), jax.grad(clipped), W, X)


def test_past_a_stopped_gradient():
    def loss(w, x):
        return loss_of(w, x) + jnp.sum(lax.stop_gradient(w) * w)

    assert_same(lambda w, x: ts.grad(loss(w, x), w), jax.grad(loss), W, X)


def test_through_a_mutable_array():
    def loss(w):
        cell = jax.new_ref(jnp.float32(1))
        cell[...] += jnp.sum(w**2)
        return cell[...] * 2

    found = ts.function(lambda w: ts.grad(loss(w), w))(W)
    np.testing.assert_allclose(found, jax.grad(loss)(W), rtol=1e-6)


def test_past_a_mutable_array_in_the_order_of_the_program():
    @ts.function
    def step(w):
        cell = jax.new_ref(jnp.float32(1))
        cell[...] = jnp.sum(w**2)
        read = cell[...] + 1.0
        slope = ts.grad(jnp.sum(w**3), w)
        cell[...] = read * 2
        return cell[...], read, slope

    total = jnp.sum(W**2)
    cell, read, slope = step(W)
    np.testing.assert_allclose([cell, read], [2 * total + 2, total + 1], rtol=1e-6)
    np.testing.assert_allclose(slope, 3 * W**2, rtol=1e-6)


def test_through_prints_of_values():
    @ts.function
    def step(w):
        loss = jnp.sum(w**2)
        jax.debug.callback(lambda value: seen.append(float(value)), loss)
        return ts.grad(loss, w)

    seen = []
    np.testing.assert_allclose(step(W), 2 * W, rtol=1e-6)
    jax.effects_barrier()
    assert seen == [pytest.approx(float(jnp.sum(W**2)))]


def test_backward_inside_a_scan_adds_up_microbatches():
    table = tensor((2, 3), init="ones", name="table")

    @graph.training_step
    def step(xs):
        def body(total, x):
            found = graph.backward(loss_of(jnp.asarray(table), x))
            return jax.tree.map(jnp.add, total, found), None

        return lax.scan(body, {"table": jnp.zeros((2, 3))}, xs)[0]

    expected = jax.grad(loss_of)(jnp.ones((2, 3)), X)
    np.testing.assert_allclose(step(X.reshape(4, 2, 2))["table"], expected, rtol=1e-5)


# --- of values from further out


def branch(w, x, flag):
    loss = loss_of(w, x)
    return lax.cond(flag, lambda: ts.grad(loss, w), lambda: jnp.zeros_like(w))


@pytest.mark.parametrize("flag", [True, False])
def test_in_a_branch_of_a_loss_from_before(flag):
    def reference(w, x, flag):
        return jnp.where(flag, jax.grad(loss_of)(w, x), 0.0)

    assert_same(branch, reference, W, X, jnp.array(flag))


def test_in_a_loop_of_a_loss_from_before():
    def step(w, x):
        loss = loss_of(w, x)

        def body(total, scale):
            inner = lax.cond(
                scale > 1, lambda: ts.grad(loss, w), lambda: jnp.zeros_like(w)
            )
            return total + scale * inner, None

        return lax.scan(body, jnp.zeros_like(w), jnp.arange(4, dtype=jnp.float32))[0]

    assert_same(step, lambda w, x: 5.0 * jax.grad(loss_of)(w, x), W, X)


def test_in_a_loop_of_a_loss_from_before_by_what_the_loop_carries():
    def step(w, x, **options):
        loss = loss_of(w, x)
        return lax.scan(
            lambda w, _: (ts.grad(loss, {"w": w}, **options)["w"], None),
            w,
            None,
            length=2,
        )[0]

    with pytest.raises(UnconnectedGradientError, match="does not depend on 'w'"):
        ts.function(step)(W, X)
    zeros = ts.function(lambda w, x: step(w, x, allow_unused=True))(W, X)
    np.testing.assert_array_equal(zeros, jnp.zeros_like(W))


def test_of_a_loss_that_is_half_computed_before():
    def step(w, x):
        loss = loss_of(w, x)
        return lax.cond(loss > 0, lambda: ts.grad(2.0 * loss, w), lambda: w)

    with pytest.raises(UnconnectedGradientError) as caught:
        ts.function(step)(W, X)
    hint = "in a loop or a branch, compute all of the loss in the body, or all before"
    assert hint in str(caught.value)


def test_in_branches_that_python_writes():
    def step(w, x):
        loss = loss_of(w, x)
        slope = jnp.zeros_like(w)
        if loss > 0.5:
            slope = ts.grad(loss, w)
        for _ in range(4):
            if loss_of(w, x) <= 1.0:
                break
            w = w - 0.05 * ts.grad(loss_of(w, x), w)
        return w, slope

    def reference(w, x):
        slope = jax.grad(loss_of)
        trained = w
        for _ in range(4):
            w_next = trained - 0.05 * slope(trained, x)
            trained = jnp.where(loss_of(trained, x) > 1.0, w_next, trained)
        return trained, slope(w, x)

    found, expected = ts.function(step)(W, X), jax.jit(reference)(W, X)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


# --- of what a nested program ignores


@pytest.mark.parametrize(
    "ignoring",
    [
        jax.jit(lambda w, x: jnp.sum(x)),
        jax.checkpoint(lambda w, x: jnp.sum(x)),
        lambda w, x: lax.cond(x[0, 0] > 0, lambda w: 1.0, lambda w: jnp.sum(x), w),
        lambda w, x: lax.scan(lambda c, _: ((c[0], c[1] * 2), None), (w, x), None, 2)[
            0
        ][1].sum(),
    ],
    ids=["jit", "remat", "cond", "scan"],
)
def test_a_nested_program_that_ignores_a_weight_is_no_path_to_the_loss(ignoring):
    with pytest.raises(UnconnectedGradientError, match="does not depend on 'w'"):
        ts.function(lambda w, x: ts.grad(ignoring(w, x), {"w": w, "x": x}))(W, X)


# --- gradients in rules, and of gradients in nested programs


def squared_slope(w, x):
    return jnp.sum(ts.grad(loss_of(w, x), w) ** 2)


def squared_slope_in_jax(w, x):
    return jnp.sum(jax.grad(loss_of)(w, x) ** 2)


def test_through_a_users_rule_that_takes_a_gradient_itself():
    def ruled(slope):
        function = jax.custom_vjp(slope)
        function.defvjp(
            lambda w, x: (slope(w, x), (w, slope(w, x))),
            lambda kept, g: (kept[0] * kept[1] * g, None),
        )
        return function

    assert_same(
        lambda w, x: ts.grad(ruled(squared_slope)(w, x), w),
        jax.grad(ruled(squared_slope_in_jax)),
        W,
        X,
    )


@pytest.mark.parametrize(
    "wrap",
    [
        jax.jit,
        jax.checkpoint,
        lambda f: lambda w, x: lax.cond(w[0, 0] < 9, f, lambda w, x: 0.0, w, x),
        lambda f: (
            lambda w, x: lax.scan(lambda c, _: (c + f(w, x), None), 0.0, None, 2)[0]
        ),
    ],
    ids=["jit", "remat", "cond", "scan"],
)
def test_gradients_of_gradients_in_nested_programs(wrap):
    found = ts.function(lambda w, x: ts.grad(wrap(squared_slope)(w, x), w))(W, X)
    expected = jax.grad(wrap(squared_slope_in_jax))(W, X)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_a_loop_of_unknown_length_has_no_backward_pass():
    @ts.function
    def step(w, n):
        loss = lax.fori_loop(0, n, lambda _, total: total + jnp.sum(w**2), 0.0)
        return ts.grad(loss, w)

    with pytest.raises(UndifferentiableError) as caught:
        step(W, jnp.int32(3))
    text = str(caught.value)
    assert text.startswith("[T317] a gradient cannot go through a loop whose number")
    assert f"ts.grad was called at {__file__}" in text


# --- microbatches in a Python loop


def test_gradients_are_accumulated_over_a_list_of_batches():
    def step(micro_batches, weights, steps):
        sums, total = None, 0.0
        for batch in micro_batches:
            loss = loss_of(weights["w"], batch["x"])
            total += loss
            slopes = ts.grad(loss / steps, weights)
            if sums is None:
                sums = slopes
            else:
                sums = {name: sums[name] + slopes[name] for name in sums}
        return total / len(micro_batches), sums

    found = ts.function(step)([{"x": part} for part in jnp.split(X, 4)], {"w": W}, 4)
    loss, slope = jax.value_and_grad(loss_of)(W, X)
    np.testing.assert_allclose(found[0], loss / 4, rtol=1e-5)
    np.testing.assert_allclose(found[1]["w"], slope / 4, rtol=1e-5, atol=1e-6)


# --- nested functions


def test_a_nested_function_takes_the_gradient_by_the_outer_ones_arguments():
    @ts.function
    def with_slope(loss_fn, weights, x):
        loss = loss_fn(weights["w"], x)
        return loss, ts.grad(loss, weights)

    @ts.function
    def compute_loss(loss_fn, w, x):
        return loss_fn(w, x)

    def step(weights, x):
        loss, slopes = with_slope(loss_of, weights, x)
        again = ts.grad(compute_loss(loss_of, weights["w"], x), weights)
        return loss, jax.tree.map(jnp.add, slopes, again)

    loss, slopes = ts.function(step)({"w": W}, X)
    expected, slope = jax.value_and_grad(loss_of)(W, X)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    np.testing.assert_allclose(slopes["w"], 2 * slope, rtol=1e-5)
