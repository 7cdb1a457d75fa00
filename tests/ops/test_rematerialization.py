# SPDX-License-Identifier: Apache-2.0
"""ts.remat: the same gradients in less memory, by recomputing."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tessera as ts
from tessera.errors import ArgumentError, SettingValueError
from tessera.jax_compat import jaxprs
from tessera.ops import rematerialization
from tessera.ops.rematerialization import POLICIES, remat
from tessera.train.models import layer_scan

pytestmark = pytest.mark.usefixtures("optimized")

X = jnp.ones((64, 16))
WEIGHTS = jnp.asarray(
    np.random.default_rng(0).normal(size=(6, 16, 128), scale=0.1), jnp.float32
)


def layer(x, weight):
    return jnp.tanh(x @ weight) @ weight.T


def scanned(policy, body=layer):
    again = remat(body, policy=policy)

    @ts.function
    def step(x, weights):
        def one(x, weight):
            return again(x, weight), None

        out, _ = jax.lax.scan(one, x, weights)
        return ts.grad((out**2).sum(), weights)

    return step


def num_tanh(compiled):
    return len(re.findall(r" tanh\(", compiled.as_text()))


@pytest.mark.slow(reason="the one test of what each policy keeps")
def test_the_compiled_program_computes_again_and_keeps_less():
    plain = scanned("none").compile(X, WEIGHTS)
    for policy, tanhs, share in (("full", 2, 0.4), ("dots", 2, 0.8)):
        compiled = scanned(policy).compile(X, WEIGHTS)
        assert (num_tanh(plain), num_tanh(compiled)) == (1, tanhs)
        assert compiled.memory.temporaries < share * plain.memory.temporaries


@pytest.mark.parametrize(
    "policy",
    [
        name if name in ("full", "dots") else pytest.param(name, marks=pytest.mark.full)
        for name in ("none", *POLICIES)
    ],
)
def test_gradients_are_the_same_under_every_policy(policy):
    def loss(weights):
        out, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), X, weights)
        return (out**2).sum()

    expected = jax.grad(loss)(WEIGHTS)
    np.testing.assert_allclose(scanned(policy)(X, WEIGHTS), expected, rtol=2e-4)


def test_a_step_without_a_loop_is_the_program_of_hand_written_jax():
    """How much of it a compiler merges again is the compiler's: that of CPU merges all
    in JAX 0.10.
    """

    def loss_by(apply, x, weights):
        for i in range(6):
            x = apply(x, weights[i])
        return (x**2).sum()

    @ts.function
    def step(x, weights):
        return ts.grad(loss_by(remat(layer), x, weights), weights)

    by_hand = jax.jit(
        jax.grad(lambda x, w: loss_by(jax.checkpoint(layer), x, w), argnums=1)
    )
    expected = by_hand.lower(X, WEIGHTS).compile()
    found = step.compile(X, WEIGHTS)
    assert num_tanh(found) == len(re.findall(r" tanh\(", expected.as_text()))
    temporaries = expected.memory_analysis().temp_size_in_bytes
    assert found.memory.temporaries == temporaries
    np.testing.assert_allclose(step(X, WEIGHTS), by_hand(X, WEIGHTS), rtol=1e-5)


def test_a_nested_function_of_tessera_is_computed_again():
    step = scanned("full", body=ts.function(layer))
    assert num_tanh(step.compile(X, WEIGHTS)) == 2


def test_it_decorates_functions_of_which_jax_takes_the_gradient():
    @ts.remat
    def activation(x):
        return jnp.tanh(x) ** 2

    assert activation.__name__ == "activation"
    gradient = jax.grad(lambda x: activation(x).sum())
    np.testing.assert_allclose(
        gradient(X), jax.grad(lambda x: (jnp.tanh(x) ** 2).sum())(X)
    )
    assert "prevent_cse=True" in str(jax.make_jaxpr(gradient)(X))


def test_what_is_no_array_is_static():
    @remat
    def power(x, exponent, *, kind, weights):
        assert (exponent, kind) == (3, "up")
        return x**exponent * weights["w"] if kind == "up" else x

    found = jax.grad(lambda x: power(x, 3, kind="up", weights={"w": 2.0}).sum())(X)
    np.testing.assert_allclose(found, 6.0 * X**2)


def test_weights_that_are_captured_get_their_gradients():
    @ts.function
    def step(x, weight):
        @ts.remat
        def inner(x):
            return jnp.tanh(x @ weight)

        return ts.grad(inner(x).sum(), weight)

    expected = jax.grad(lambda w: jnp.tanh(X @ w).sum())(WEIGHTS[0])
    np.testing.assert_allclose(step(X, WEIGHTS[0]), expected, rtol=1e-5)


@pytest.mark.full
def test_each_call_declares_parameters_of_its_own():
    """JAX alone would remember the first trace, and share its parameters."""
    blocks = {"block", "block_1"}

    @ts.remat
    def block(x):
        return ts.op.transformer_block(x, depth=1, num_heads=1)

    @ts.graph.training_step
    def step(x):
        loss = jnp.mean(block(block(x)) ** 2)
        return loss, ts.graph.backward(loss)

    traced = step.trace(jnp.ones((1, 2, 8))).origin
    assert {name.partition("/")[0] for name in traced.parameters} == blocks
    _, gradients = traced.unflatten(range(traced.result.num_arrays))
    assert gradients.keys() == blocks


def test_a_gradient_inside_a_checkpoint_is_one():
    @ts.function
    def step(x):
        @ts.remat
        def penalty(x):
            inner = jnp.sum(jnp.sin(x))
            return jnp.sum(ts.grad(inner, x) ** 2)

        return ts.grad(penalty(x), x)

    expected = jax.grad(lambda x: jnp.sum(jnp.cos(x) ** 2))(X)
    np.testing.assert_allclose(step(X), expected, rtol=1e-5)


def test_autocast_around_a_checkpoint_reaches_what_is_computed_again():
    @ts.function
    def step(x, weights):
        with ts.autocast("bf16"):
            out = remat(layer)(x, weights)
        return ts.grad(out.sum(), weights)

    program = jaxprs.pretty(step.trace(X, WEIGHTS[0]).graph.program)
    # Twice forwards and twice backwards for each of two products, less what nobody
    # reads: the last product is not computed again.
    assert program.count("dot_general") == 6
    assert program.count("reduce_precision") == 2 * 6


def test_checkpoint_is_an_alias():
    assert ts.checkpoint is ts.remat


# --- called at once, as torch.utils.checkpoint is


class Checkpointed(nnx.Module):
    """As PyTorch's users write it; ``apply`` calls a layer."""

    def __init__(self, rngs):
        self.layer1 = nnx.Linear(16, 8, rngs=rngs)
        self.layer2 = nnx.Linear(8, 4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.noise = nnx.Dropout(0.1, rngs=rngs)

    def activate(self, x):
        return self.dropout(jnp.tanh(x))

    def __call__(self, x, apply):
        x = apply(self.layer1, x)
        x = apply(self.activate, x)
        x = apply(self.noise, x)
        return self.layer2(x)


@pytest.mark.slow(reason="it compiles two training steps of a module")
def test_a_layer_that_is_called_at_once_is_computed_again():
    def losses(model, x, apply):
        loss = jnp.sum(model(x, apply) ** 2)
        return loss, ts.grad(loss, model)

    def trained(apply):
        model = Checkpointed(nnx.Rngs(0))
        step = ts.function(lambda model, x: losses(model, x, apply))
        found = step(model, X)
        counts = [
            int(each.rngs.count.get_value()) for each in (model.dropout, model.noise)
        ]
        return found, counts, str(step.trace(model, X).graph.program)

    expected, counts, plain = trained(lambda layer, x: layer(x))
    found, counts_again, again = trained(ts.checkpoint)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected
    )
    assert counts == counts_again == [1, 1]  # the module's state changes once
    assert again.count(" tanh ") == 2 * plain.count(" tanh ") == 2


def test_keywords_of_a_call_at_once_are_the_function_s():
    def scaled(x, *, scale, **rest):
        assert rest in ({}, {"kind": "up"})
        return jnp.sin(x) * scale

    for call in (
        lambda x: ts.checkpoint(scaled, x, scale=2.0, kind="up"),
        lambda x: ts.checkpoint(scaled, x=x, scale=2.0, policy="dots"),
        lambda x: ts.checkpoint(scaled, x, scale=2.0, policy="none"),
    ):
        gradient = jax.grad(lambda x, f=call: f(x).sum())(X)
        np.testing.assert_allclose(call(X), 2 * jnp.sin(X), rtol=1e-6)
        np.testing.assert_allclose(gradient, 2 * jnp.cos(X), rtol=1e-6)


def test_an_option_that_may_be_the_function_s_is_refused():
    def update(x, policy="greedy", prevent_cse=True):
        return x * (2.0 if policy == "greedy" and prevent_cse else 3.0)

    with pytest.raises(SettingValueError) as caught:
        ts.checkpoint(update, X, policy="full")
    assert caught.value.what == (
        "'policy' is an option of ts.checkpoint and a parameter of update"
    )
    with pytest.raises(SettingValueError, match="'prevent_cse' is an option"):
        ts.checkpoint(update, X, prevent_cse=True)
    two = ts.checkpoint(update)(X, policy="greedy")
    three = ts.checkpoint(update, X, "random", policy="dots")  # no doubt about it
    np.testing.assert_array_equal((two, three), (2 * X, 3 * X))


def test_options_of_pytorch_are_refused_unless_they_are_the_function_s():
    with pytest.raises(SettingValueError) as caught:
        ts.checkpoint(jnp.sin, X, use_reentrant=False)
    assert caught.value.what == "'use_reentrant' is an option of PyTorch's checkpoint"
    assert caught.value.got == "ts.checkpoint(sin, ..., use_reentrant=False)"
    found = ts.checkpoint(lambda x, debug: x + debug, X, debug=1)
    np.testing.assert_array_equal(found, X + 1)


def test_an_option_that_does_not_exist_is_no_decorator():
    with pytest.raises(ArgumentError, match="no function to call with"):
        ts.checkpoint(polcy="dots")
    with pytest.raises(SettingValueError, match="'use_reentrant' is an option of PyT"):
        ts.checkpoint(use_reentrant=False)
    with pytest.raises(SettingValueError, match="'static_argnums' is an option of JAX"):
        ts.checkpoint(jnp.sin, static_argnums=(1,))


@pytest.mark.parametrize("args", [("dots",), (jnp.sin(X),), (X, jnp.sin)])
def test_what_comes_first_is_the_function(args):
    with pytest.raises(ArgumentError, match=r"fix: ts\.checkpoint\(layer, x\)"):
        ts.checkpoint(*args)


def test_models_and_functions_share_one_table():
    assert layer_scan.POLICIES is rematerialization.POLICIES
    assert remat(layer, policy="none") is layer


def test_a_policy_of_jax_may_stand_in_place_of_a_name():
    step = scanned(jax.checkpoint_policies.nothing_saveable)
    assert num_tanh(step.compile(X, WEIGHTS)) == 2


def test_an_unknown_policy_is_an_error_that_knows_the_names():
    with pytest.raises(SettingValueError) as caught:
        remat(layer, policy="dotz")
    assert str(caught.value).startswith(
        "[T502] there is no checkpoint policy 'dotz'\n"
        "  got: policy='dotz'\n"
        "  fix: did you mean 'dots'? Known: 'none', 'full', 'dots', "
    )


@pytest.mark.full
def test_dropout_inside_drops_the_same_when_it_is_computed_again():
    key = jax.random.key(0)

    def keyed(x, key):
        is_kept = jax.random.bernoulli(key, 0.5, x.shape)
        return jnp.tanh(jnp.where(is_kept, 4 * x, 0))

    def dropped(x):
        return keyed(x, key)

    expected = jax.grad(lambda x: dropped(x).sum())(X)
    for again in (remat(dropped), lambda x: remat(keyed)(x, key)):
        found = jax.jit(jax.grad(lambda x, f=again: f(x).sum()))(X)
        np.testing.assert_array_equal(found, expected)


def test_declared_tensors_are_arguments():
    table = ts.dist.tensor((16, 4), init="ones", name="table")

    @ts.function
    def step(x):
        return ts.grad(remat(lambda x, t: jnp.sin(x @ t))(x, table).sum(), x)

    expected = jax.grad(lambda x: jnp.sin(x @ jnp.ones((16, 4))).sum())(X)
    np.testing.assert_allclose(step(X), expected, rtol=1e-5)
