# SPDX-License-Identifier: Apache-2.0
"""The router's choices and statistics, against NumPy."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tessera.ops.moe.routing import RoutingOptions, route, statistics

TOP2 = RoutingOptions(top_k=2)
X = np.random.default_rng(0).normal(size=(3, 5, 4)).astype("f4")
ROUTER = np.random.default_rng(1).normal(size=(4, 6)).astype("f4")


def probabilities(bias=0.0):
    scores = np.exp(X @ ROUTER + bias)
    return scores / scores.sum(-1, keepdims=True)


def test_a_token_goes_to_the_experts_that_score_highest_best_first():
    routes = route(X, ROUTER, TOP2)
    wanted = np.argsort(-probabilities(), axis=-1)[..., :2]
    np.testing.assert_array_equal(routes.experts, wanted)


@pytest.mark.parametrize("bias", [None, np.linspace(-2.0, 2.0, 6, dtype="f4")])
def test_weights_are_probabilities_that_add_up_to_one(bias):
    routes = route(X, ROUTER, TOP2, bias)
    best = -np.sort(-probabilities(0.0 if bias is None else bias), axis=-1)[..., :2]
    wanted = best / best.sum(-1, keepdims=True)
    np.testing.assert_allclose(routes.weights, wanted, rtol=1e-5)


def test_weights_that_are_not_renormalized_are_probabilities_among_all():
    routes = route(X, ROUTER, replace(TOP2, renormalize=False))
    best = -np.sort(-probabilities(), axis=-1)[..., :2]
    np.testing.assert_allclose(routes.weights, best, rtol=1e-5)


def test_equal_scores_are_taken_in_their_order():
    routes = route(X, np.zeros((4, 6), "f4"), TOP2)
    assert (np.asarray(routes.experts) == [0, 1]).all()


def test_the_router_scores_narrow_activations_in_f32():
    routes = route(jnp.asarray(X, jnp.bfloat16), ROUTER, TOP2)
    assert routes.logits.dtype == routes.weights.dtype == jnp.float32
    exact = np.asarray(jnp.asarray(X, jnp.bfloat16), "f4") @ ROUTER
    np.testing.assert_allclose(routes.logits, exact, rtol=1e-5, atol=1e-5)


def test_the_losses_are_those_of_the_papers():
    routes = route(X, ROUTER, TOP2)
    found = statistics(routes, ())
    p = probabilities().reshape(-1, 6)
    chosen = np.argsort(-p, axis=-1)[:, :2].reshape(-1)
    counts = np.bincount(chosen, minlength=6)
    balance = 6 * np.sum(counts / counts.sum() * p.mean(0))
    z = np.log(np.exp(X @ ROUTER).sum(-1))
    assert np.asarray(found.tokens_per_expert).tolist() == counts.tolist()
    np.testing.assert_allclose(found.load_balancing_loss, balance, rtol=1e-5)
    np.testing.assert_allclose(found.z_loss, np.mean(z**2), rtol=1e-5)
    np.testing.assert_allclose(
        found.entropy, -(p * np.log(p)).sum(-1).mean(), rtol=1e-5
    )


@pytest.mark.full
def test_a_perfect_balance_costs_one_whatever_the_number_of_choices():
    # Each token prefers two experts of its own, all equally.
    x = np.eye(4, dtype="f4").repeat(3, axis=0)[None]
    router = 5 * np.eye(4, dtype="f4") + 4 * np.roll(np.eye(4, dtype="f4"), 1, axis=1)
    for options in (TOP2, replace(TOP2, top_k=1)):
        found = statistics(route(x, router, options), ())
        np.testing.assert_allclose(found.load_balancing_loss, 1.0, rtol=1e-6)
        assert set(np.asarray(found.tokens_per_expert)) == {3.0 * options.top_k}


@pytest.mark.full
def test_the_balancing_loss_pushes_down_the_expert_that_all_choose():
    def loss(router):
        routes = route(np.abs(X), router, TOP2)
        return statistics(routes, ()).load_balancing_loss

    router = np.zeros((4, 6), "f4")
    router[:, 3] = 1.0
    gradient = np.asarray(jax.grad(loss)(router)).sum(0)
    assert gradient[3] > 0
    assert loss(router) > loss(router - gradient)
