# SPDX-License-Identifier: Apache-2.0
"""Autocast: which values are narrow, and which numbers nothing may change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tessera as ts
from tessera.graph.passes.autocast import autocast
from tessera.jax_compat import jaxprs
from tests.fuzz.autocast_reference import evaluate

X = jax.random.normal(jax.random.key(1), (8, 4))
W = jax.random.normal(jax.random.key(0), (4, 4))
WS = jnp.stack([W, W.T, -W])
BF16 = jnp.bfloat16


def narrowed(function, *args, dtype="bf16"):
    """The program of a function under autocast, after the pass alone."""

    def inside(*args):
        with ts.autocast(dtype):
            return function(*args)

    skip = ["autocast", "widen_sums", "orient_matmuls"]
    traced = ts.function(inside, skip_passes=skip).trace(*args)
    return autocast(traced.graph)


def values(function, *args, dtype="bf16"):
    """What a function computes under autocast, one operation at a time."""
    graph = narrowed(function, *args, dtype=dtype)
    return evaluate(graph.program, [*jax.tree.leaves(args), *graph.captured])


def equations(program, *names):
    for equation in jaxprs.equations(program):
        if equation.primitive.name in names:
            yield equation
        for _, inner in jaxprs.nested(equation):
            yield from equations(inner, *names)


def results(function, name, *args, dtype="bf16"):
    """The dtypes of all results of a primitive."""
    program = narrowed(function, *args, dtype=dtype).program
    found = equations(program, name)
    return [v.aval.dtype.name for equation in found for v in equation.outvars]


def rounded(x, dtype=BF16):
    return jnp.asarray(x, jnp.float32).astype(dtype).astype(jnp.float32)


def product(x, w, dtype=BF16):
    return rounded(x, dtype) @ rounded(w, dtype)


# --- activations between matmuls are narrow


@pytest.mark.parametrize(
    "activation",
    [jax.nn.relu, jax.nn.gelu, jax.nn.silu, jnp.tanh, jnp.abs, jnp.negative],
)
def test_what_leads_from_matmul_to_matmul_is_narrow(activation):
    program = narrowed(lambda x, w: activation(x @ w) @ w, X, W).program
    first, last = equations(program, "dot_general")
    assert first.outvars[0].aval.dtype == last.invars[0].aval.dtype == BF16
    assert last.outvars[0].aval.dtype == jnp.float32


def test_a_result_that_only_f32_operations_read_is_not_rounded():
    (out,) = values(lambda x, w: jnp.exp(x @ w), X, W)
    np.testing.assert_array_equal(out, jnp.exp(product(X, W)))


def test_a_result_that_both_read_is_one_number():
    def function(x, w):
        y = x @ w
        return jnp.exp(y), jnp.tanh(y) @ w

    out, _ = values(function, X, W)
    np.testing.assert_array_equal(out, jnp.exp(rounded(product(X, W))))


def test_a_wide_operand_widens_the_sum_as_promotion_does():
    def function(x, w):
        return jnp.tanh(x[:4] + x[:4] @ w) @ w

    assert results(function, "tanh", X, W) == ["float32"]
    out = values(function, X, W)[0]
    h = jnp.tanh(X[:4] + product(X[:4], W))
    np.testing.assert_array_equal(out, product(h, W))


def test_a_bias_is_narrow_with_its_matmul():
    bias = W[0] / 3
    program = narrowed(lambda x, w, b: jnp.abs(x @ w + b) @ w, X, W, bias).program
    assert next(iter(equations(program, "abs"))).outvars[0].aval.dtype == BF16
    out = values(lambda x, w, b: jnp.abs(x @ w + b) @ w, X, W, bias)[0]
    h = jnp.abs(rounded(rounded(product(X, W)) + bias))
    np.testing.assert_array_equal(out, product(h, W))


def test_a_number_is_not_rounded_before_it_is_used():
    out = values(lambda x, w: (x @ w * 0.3) @ w, X, W)[0]
    h = rounded(rounded(product(X, W)) * np.float32(0.3))
    np.testing.assert_array_equal(out, product(h, W))


def test_a_number_that_would_be_infinite_keeps_the_array_in_f32():
    mask = np.arange(4) < 2
    low = jnp.finfo("float32").min  # rounded to bf16 it is -inf

    def function(x, w):
        return jnp.maximum(jnp.where(mask, x @ w, low) * 0.0, -1.0) @ w

    assert np.isfinite(values(function, X, W)[0]).all()


def test_powers_are_f32_in_f16_whose_range_they_leave():
    def function(x, w):
        return ((x @ w) ** 3 * 1e-6) @ w

    assert results(function, "integer_pow", X, W, dtype="f16") == ["float32"]
    out = values(function, X * 100, W, dtype="f16")[0]
    assert np.isfinite(out).all()


# --- gradients of parameters are f32


def test_gradients_of_a_shared_weight_are_added_up_in_f32():
    def function(x, w):
        return ts.grad(jnp.sum(jnp.tanh(x @ w) @ w), w)

    program = narrowed(function, X, W).program
    gradients = [
        e
        for e in equations(program, "dot_general")
        if e.outvars[0].aval.shape == (4, 4)
    ]
    assert [e.outvars[0].aval.dtype for e in gradients] == [jnp.float32] * 2
    *_, total = equations(program, "add_any")
    assert total.outvars[0].aval.shape == (4, 4)
    assert {a.aval.dtype for a in total.invars} == {np.dtype("float32")}


def test_an_optimizer_inside_gets_gradients_that_are_not_rounded():
    def function(x, w):
        gradient = ts.grad(jnp.sum(jnp.exp(x @ w)), w)
        return w - 0.1 * gradient

    out = values(function, X, W)[0]
    gradient = product(X.T, jnp.exp(product(X, W)))
    np.testing.assert_allclose(out, W - 0.1 * gradient, rtol=1e-6)


def test_gradients_that_a_loop_adds_up_stay_in_f32():
    def function(x, w):
        h = lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, length=3)[0]
        return ts.grad(jnp.sum(h), w)

    *_, backward = equations(narrowed(function, X, W).program, "scan")
    dtypes = {v.aval.shape: v.aval.dtype for v in backward.outvars}
    assert dtypes[4, 4] == jnp.float32


# --- loops


def test_an_accumulator_that_starts_with_zeros_stays_in_f32():
    def function(x, ws):
        def body(total, w):
            return total + x @ w, None

        return lax.scan(body, jnp.zeros((8, 4)), ws)[0] @ ws[0]

    (loop,) = equations(narrowed(function, X, WS).program, "scan")
    assert loop.outvars[0].aval.dtype == jnp.float32
    total = sum(product(X, w) for w in WS)
    np.testing.assert_allclose(
        values(function, X, WS)[0], product(total, W), rtol=1e-6, atol=1e-6
    )


def test_a_carry_is_narrow_if_its_first_value_and_the_next_ones_are():
    def function(x, ws):
        h = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x @ ws[0], ws)[0]
        return h @ ws[0]

    (loop,) = equations(narrowed(function, X, WS).program, "scan")
    assert loop.outvars[0].aval.dtype == BF16


def mlp(x, ws):
    """Layers with an f32 norm and a residual stream, and the gradient by them."""

    def layer(h, w):
        normed = h * lax.rsqrt(jnp.mean(h**2, axis=-1, keepdims=True) + 1e-6)
        up = jax.nn.silu(normed @ w) * (normed @ w.T)
        return h + up @ w, None

    h = lax.scan(layer, x, ws)[0]
    return ts.grad(jnp.sum(h**2), ws)


def test_a_loop_stacks_what_the_backward_pass_reads_in_bf16():
    forward, backward = equations(narrowed(mlp, X, WS).program, "scan")
    stacked = [v.aval for v in forward.outvars if v.aval.shape == (3, 8, 4)]
    # The stream and its normalized form are f32 in the norm; the rest is narrow.
    names = [aval.dtype.name for aval in stacked]
    assert names.count("bfloat16") >= 5, names
    assert names.count("float32") <= 2, names
    assert {v.aval.dtype.name for v in backward.outvars} == {"float32"}


def test_a_loop_stacks_much_less():
    """Compiled memory is in ``tests/targets``: XLA's CPU compiler widens it again."""

    def stacked(dtype):
        forward, _ = equations(narrowed(mlp, X, WS, dtype=dtype).program, "scan")
        avals = [v.aval for v in forward.outvars if v.aval.ndim > 2]
        return sum(aval.size * aval.dtype.itemsize for aval in avals)

    assert stacked("bf16") < 0.7 * stacked("f32")


# --- what sees the f32 value


def test_comparisons_compare_with_the_number_of_the_program():
    w = np.float32([[0.1]])  # more in bf16 than in f32
    out = values(lambda x, w: jnp.where(x @ w > 0.1, 1.0, 0.0) + (x @ w) @ w, w / w, w)
    assert out[0][0, 0] > 1


def test_bits_are_those_of_f32():
    def function(x, w):
        y = x @ w
        return lax.bitcast_convert_type(y, jnp.int32), jnp.tanh(y) @ w

    bits, _ = values(function, X, W)
    expected = lax.bitcast_convert_type(rounded(product(X, W)), jnp.int32)
    np.testing.assert_array_equal(bits, expected)


def test_callbacks_get_f32():
    seen = []

    def function(x, w):
        y = x @ w
        jax.debug.callback(lambda y: seen.append(y.dtype), y)
        return jnp.tanh(y) @ w

    @ts.function
    def step(x, w):
        with ts.autocast("bf16"):
            return function(x, w)

    jax.block_until_ready(step(X, W))
    jax.effects_barrier()
    assert seen == [np.dtype("float32")]


@pytest.mark.parametrize("kind", ["cond", "while"])
def test_branches_and_while_loops_take_and_give_f32(kind):
    def function(x, w):
        y = x @ w
        if kind == "cond":
            y = lax.cond(y[0, 0] > 0, lambda y: jnp.tanh(y @ w), lambda y: y, y)
        else:
            y = lax.while_loop(lambda y: y[0, 0] > 9, lambda y: y @ w, y)
        return y @ w

    assert set(results(function, kind, X, W)) == {"float32"}


def test_other_dtypes_are_left_alone():
    args = X.astype("float16"), W.astype("float16"), jnp.arange(4), jnp.full(4, 1j)

    def function(x, w, n, c):
        return jnp.tanh(x @ w) @ w, n @ n, c @ c, (x @ w > 0) & (n > 1)

    graph = narrowed(function, *args)
    assert "bf16" not in jaxprs.pretty(graph.program)


def test_an_explicit_cast_of_a_narrow_array_gives_f32():
    def function(x, w):
        return jnp.tanh((x.astype(BF16) @ w.astype(BF16)).astype(jnp.float32)) @ w

    assert results(function, "tanh", X, W) == ["float32"]


def test_outside_and_in_another_autocast_the_value_is_wide():
    def function(x, w):
        y = x @ w
        with ts.autocast("bf16", enabled=False):
            off = jnp.tanh(y)
        with ts.autocast("f16"):
            other = jnp.tanh(y)
        return (off @ w) + (other @ w)

    assert set(results(function, "tanh", X, W)) == {"float32"}


def test_random_numbers_are_those_of_f32():
    key = jax.random.key(3)

    def function(x, w):
        y = x @ w
        kept = jax.random.bernoulli(key, 0.7, y.shape)
        return jnp.where(kept, y / 0.5, 0.0) @ w

    h = jnp.where(
        jax.random.bernoulli(key, 0.7, X.shape), rounded(product(X, W)) / 0.5, 0
    )
    np.testing.assert_array_equal(values(function, X, W)[0], product(h, W))


def test_stop_gradient_stops_it():
    def function(x, w):
        return ts.grad(jnp.sum(jnp.tanh(lax.stop_gradient(x @ w) @ w)), w)

    y = rounded(product(X, W))
    slope = rounded(1 - rounded(jnp.tanh(rounded(product(y, W)))) ** 2)
    np.testing.assert_allclose(
        values(function, X, W)[0], product(y.T, slope), rtol=0.02, atol=0.02
    )


def test_a_derivative_of_its_own_holds_when_jax_differentiates_the_function():
    @ts.function
    def function(x):
        with ts.autocast("bf16"):
            return jnp.sum(jax.nn.relu(x @ W) @ W)

    # By its own rule, relu has no slope at zero; that of a maximum is a half.
    np.testing.assert_array_equal(jax.grad(function)(jnp.zeros((1, 4))), 0.0)


def test_names_for_checkpoint_policies_are_kept():
    name = jax.ad_checkpoint.checkpoint_name
    policy = jax.checkpoint_policies.save_only_these_names("kept")

    def layer(h, w):
        kept = name(jnp.tanh(h @ w), "kept")
        return jnp.tanh(kept @ w)

    def function(x, ws):
        rematerialized = jax.checkpoint(layer, policy=policy)
        h = lax.scan(lambda h, w: (rematerialized(h, w), None), x, ws)[0]
        return ts.grad(jnp.sum(h), ws)

    forward, _ = equations(narrowed(function, X, WS).program, "scan")
    dtypes = [v.aval.dtype.name for v in forward.outvars if v.aval.shape == (3, 8, 4)]
    assert "bfloat16" in dtypes
