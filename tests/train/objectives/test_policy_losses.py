# SPDX-License-Identifier: Apache-2.0
"""Losses of completions: advantages, lengths, ratios, KL, masks, metrics."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.train.objectives.policy_losses import (
    ALGORITHMS,
    CLIP_RANGES,
    PolicySettings,
    SampledTokens,
    advantages,
    policy_loss,
    token_weights,
)

every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)
compiled = jax.jit(policy_loss, static_argnums=2)


# Advantages


def judged(rewards: np.ndarray) -> np.ndarray:
    """The advantages of rewards, NaN where missing, as one reads them in the papers."""

    def spread(values):
        return np.nanstd(values, ddof=1) + 1e-4

    results = {name: np.zeros(rewards.shape) for name in ALGORITHMS}
    for row, group in enumerate(rewards):
        for i, reward in enumerate(group):
            others = np.delete(group, i)
            if np.isnan(reward) or np.isnan(others).all():
                continue
            above = reward - np.nanmean(group)
            results["dr_grpo"][row, i] = above
            for name in ("grpo", "dapo", "gspo"):
                results[name][row, i] = above / spread(group)
            results["rloo"][row, i] = reward - np.nanmean(others)
    if np.isfinite(rewards).sum() > 1:
        above = (rewards - np.nanmean(rewards)) / spread(rewards)
        results["reinforce++"] = np.nan_to_num(above)
    return results


@every_algorithm
@given(
    seed=st.integers(0, 2**32),
    shape=st.tuples(st.integers(1, 5), st.integers(1, 6)),
    offset=st.sampled_from([0.0, -3.0, 1e3]),
)
def test_advantages_are_those_of_the_papers(algorithm, seed, shape, offset):
    draw = np.random.default_rng(seed)
    rewards = draw.normal(size=shape) + offset
    missing = draw.uniform(size=shape) < 0.3
    got = advantages(algorithm, rewards, missing)
    expected = judged(np.where(missing, np.nan, rewards))[algorithm]
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9)
    assert not got[missing].any()


@every_algorithm
@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, 1e16, -7.3], ids=str)
def test_a_group_without_variance_has_no_advantage_at_all(algorithm, reward):
    """Not the rounding of its mean over 1e-4."""
    rewards, missing = np.full((2, 7), reward), np.zeros((2, 7), bool)
    rewards[0, 3], missing[0, 3] = 55.0, True
    assert not advantages(algorithm, rewards, missing).any()


@every_algorithm
def test_a_reward_that_is_no_number_is_missing(algorithm):
    rewards = np.array([[1.0, np.nan, 2.0, 4.0], [np.inf, 1.0, 0.0, -np.inf]])
    got = advantages(algorithm, rewards, np.zeros((2, 4), bool))
    finite = np.where(np.isfinite(rewards), rewards, 99.0)
    np.testing.assert_array_equal(
        got, advantages(algorithm, finite, ~np.isfinite(rewards))
    )
    assert np.isfinite(got).all()
    assert not got[~np.isfinite(rewards)].any()


@every_algorithm
@pytest.mark.parametrize("size", [0, 1, 3])
def test_less_than_two_rewards_are_not_compared(algorithm, size):
    rewards, missing = np.arange(float(size))[None], np.arange(size)[None] > 0
    assert not advantages(algorithm, rewards, missing).any()


def test_only_reinforce_compares_completions_of_different_prompts():
    rewards, missing = np.array([[0.0, 1.0], [10.0, 10.0]]), np.zeros((2, 2), bool)
    for algorithm in ALGORITHMS:
        got = advantages(algorithm, rewards, missing)
        if algorithm == "reinforce++":
            assert got[1, 0] == got[1, 1] > 0
        else:
            assert not got[1].any()


# What a token counts

LENGTHS = np.array([4, 0, 2, 10], np.int32)
LEARNED = np.array([True, True, True, False])


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ("grpo", [1 / 16, 0, 1 / 8, 0]),
        ("gspo", [1 / 16, 0, 1 / 8, 0]),
        ("rloo", [1 / 16, 0, 1 / 8, 0]),
        ("dr_grpo", [1 / 40, 0, 1 / 40, 0]),
        ("dapo", [1 / 6, 0, 1 / 6, 0]),
        ("reinforce++", [1 / 6, 0, 1 / 6, 0]),
    ],
)
def test_what_a_token_of_each_completion_counts(algorithm, expected):
    """Empty completions and those that are not learned count nothing."""
    got = token_weights(algorithm, LENGTHS, LEARNED, max_tokens=10)
    np.testing.assert_allclose(got, expected, rtol=1e-15)
    grouped = token_weights(
        algorithm, LENGTHS.reshape(2, 2), LEARNED.reshape(2, 2), max_tokens=10
    )
    np.testing.assert_array_equal(grouped.ravel(), got)


@every_algorithm
def test_a_batch_of_which_nothing_is_learned_counts_nothing(algorithm):
    assert not token_weights(algorithm, LENGTHS, np.zeros(4, bool), 10).any()
    assert not token_weights(algorithm, np.zeros(4, int), LEARNED, 10).any()


# The loss

SHAPE = (5, 7)
COMPLETION = np.array([7, 1, 4, 0, 6])


def some_tokens(seed: int) -> tuple[np.ndarray, SampledTokens]:
    """Log-probabilities, and tokens of which nothing but NaN is masked."""
    draw = np.random.default_rng(seed)
    mask = np.arange(SHAPE[1]) < COMPLETION[:, None]
    mask[4, 2:4] = False  # a tool's answer

    def noisy(scale):
        noise = scale * draw.normal(size=SHAPE)
        return np.where(mask, base + noise, np.nan).astype(np.float32)

    base = -draw.uniform(0.01, 4, SHAPE)
    per_row = np.broadcast_to(draw.normal(size=(5, 1)), SHAPE).astype(np.float32)
    return noisy(0), SampledTokens(
        advantages=np.where(mask, per_row, np.nan),
        weights=np.where(mask, draw.uniform(0, 1, SHAPE), np.nan).astype(np.float32),
        mask=mask,
        old=noisy(0.3),
        sampled=noisy(0.4),
        reference=noisy(0.5),
    )


def formula(
    log_probs: np.ndarray, tokens: SampledTokens, settings: PolicySettings
) -> float:
    """The loss, token by token in f64; the importance weights are those of ``old``."""
    total = 0.0
    for row in range(SHAPE[0]):
        steps = np.flatnonzero(tokens.mask[row])
        at = {
            name: np.asarray(array, np.float64)[row, steps]
            for name, array in tokens._asdict().items()
        }
        log_ratio = log_probs[row, steps] - at["old"]
        if settings.algorithm == "gspo" and steps.size:
            log_ratio = np.full(steps.size, log_ratio.mean())
        if settings.algorithm == "rloo":
            log_ratio = np.full(steps.size, log_ratio.sum())
        ratio, low, high = np.exp(log_ratio), *settings.clip
        clipped = np.clip(ratio, 1 - low, 1 + high)
        loss = -np.minimum(ratio * at["advantages"], clipped * at["advantages"])
        if settings.importance_cap is not None:
            loss *= np.minimum(
                np.exp(at["old"] - at["sampled"]), settings.importance_cap
            )
        d = log_probs[row, steps] - at["reference"]
        kl = {"k2": d**2 / 2, "k3": np.exp(-d) - 1 + d}[settings.kl_estimator]
        total += (at["weights"] * (loss + settings.kl_coefficient * kl)).sum()
    return total


SETTINGS = [
    PolicySettings(
        algorithm,
        clip=CLIP_RANGES[algorithm],
        kl_coefficient=0.3,
        kl_estimator=estimator,
        importance_cap=cap,
    )
    for algorithm, estimator, cap in zip(
        ALGORITHMS,
        ["k3", "k2"] * 3,
        [None, None, 1.2, 1.2, 2.0, None],
        strict=True,
    )
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: s.algorithm)
def test_losses_and_gradients_are_those_of_the_papers(settings):
    def summed(log_probs, tokens):
        return policy_loss(log_probs, tokens, settings).losses.sum()

    loss = jax.jit(jax.value_and_grad(summed))
    for seed in range(8):
        log_probs, tokens = some_tokens(seed)
        value, gradient = loss(log_probs, tokens)
        wide = log_probs.astype(np.float64)
        assert value == pytest.approx(formula(wide, tokens, settings), rel=1e-5)
        expected, step = np.zeros(SHAPE), 1e-6
        for place in np.argwhere(tokens.mask):
            nudge = np.zeros(SHAPE)
            nudge[tuple(place)] = step
            above, below = (
                formula(wide + sign * nudge, tokens, settings) for sign in (1, -1)
            )
            expected[tuple(place)] = (above - below) / (2 * step)
        np.testing.assert_allclose(gradient, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: s.algorithm)
def test_nothing_of_a_masked_token_is_read(settings):
    log_probs, tokens = some_tokens(0)
    zeros = SampledTokens(*(np.nan_to_num(array) for array in tokens))
    got = compiled(log_probs, tokens, settings)
    expected = compiled(np.nan_to_num(log_probs), zeros, settings)
    for ours, theirs in zip(
        jax.tree.leaves(got), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
    assert not got.losses[~tokens.mask].any()


@every_algorithm
def test_a_rollout_used_once_is_its_own_old_policy(algorithm):
    """The ratio is 1, and the gradient that of REINFORCE."""
    log_probs, tokens = some_tokens(1)
    settings = PolicySettings(algorithm)
    mask = tokens.mask

    def loss(log_probs, old):
        known = tokens._replace(old=old, reference=None)
        return policy_loss(log_probs, known, settings).losses.sum()

    alone = jax.value_and_grad(loss)(log_probs, None)
    beside = jax.value_and_grad(loss)(log_probs, log_probs)
    for ours, theirs in zip(alone, beside, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    share = np.where(mask, -tokens.advantages * tokens.weights, 0)
    assert alone[0] == pytest.approx(share.sum(), rel=1e-5)
    if algorithm == "gspo":
        share = share.sum(1, keepdims=True) / np.maximum(mask.sum(1, keepdims=True), 1)
    if algorithm == "rloo":
        share = share.sum(1, keepdims=True)
    np.testing.assert_allclose(alone[1], np.where(mask, share, 0), rtol=1e-5, atol=1e-7)


def test_rloo_moves_each_token_by_the_advantage_of_its_completion():
    """A completion is one action: long ones move each token as much as short ones."""
    lengths = np.array([3, 7])
    mask = np.arange(7) < lengths[:, None]
    weights = token_weights("rloo", lengths, np.ones(2, bool), 7)
    tokens = SampledTokens(
        np.array([[2.0], [-1.0]], np.float32) * np.ones((2, 7), np.float32),
        (weights[:, None] * mask).astype(np.float32),
        mask,
    )
    gradient = jax.grad(
        lambda p: policy_loss(p, tokens, PolicySettings("rloo")).losses.sum()
    )(-np.ones((2, 7), np.float32))
    np.testing.assert_allclose(gradient, np.where(mask, [[-1.0], [0.5]], 0), rtol=1e-6)


@pytest.mark.parametrize("algorithm", ["grpo", "gspo", "dapo"])
def test_a_ratio_beyond_the_range_has_no_gradient(algorithm):
    """But where it would be pushed back: high with a loss, low with a gain."""
    log_ratio = np.repeat(np.float32([[0.5], [0.5], [-0.5], [-0.5]]), 2, axis=1)
    tokens = SampledTokens(
        np.repeat(np.float32([[1], [-1], [1], [-1]]), 2, axis=1),
        np.ones((4, 2), np.float32),
        np.ones((4, 2), bool),
        old=np.zeros((4, 2), np.float32),
    )
    settings = PolicySettings(algorithm, clip=(0.2, 0.28))
    gradient = jax.grad(lambda p: policy_loss(p, tokens, settings).losses.sum())
    assert (gradient(log_ratio) != 0).tolist() == [
        [False] * 2,
        [True] * 2,
        [True] * 2,
        [False] * 2,
    ]
    sums = policy_loss(log_ratio, tokens, settings).sums
    assert (sums["clipped_high"], sums["clipped_low"]) == (2.0, 2.0)


def test_what_a_microbatch_measures():
    log_probs, tokens = some_tokens(2)
    mask = tokens.mask
    got = policy_loss(log_probs, tokens, PolicySettings("grpo"))
    excess = (log_probs - tokens.reference)[mask]
    expected = {
        "tokens": mask.sum(),
        "kl": (np.exp(-excess) - 1 + excess).sum(),
        "entropy": -log_probs[mask].sum(),
        "mismatch": np.abs(tokens.old - tokens.sampled)[mask].sum(),
    }
    assert {name: float(got.sums[name]) for name in expected} == pytest.approx(
        expected, rel=1e-5
    )
    assert all(value.dtype == jnp.float32 for value in jax.tree.leaves(got))


def test_what_is_measured_has_no_gradient():
    log_probs, tokens = some_tokens(2)

    def measured(log_probs):
        results = policy_loss(log_probs, tokens, PolicySettings("grpo"))
        return sum(results.sums.values())

    assert not jax.grad(measured)(log_probs).any()


def test_the_measured_kl_costs_nothing_without_a_coefficient():
    log_probs, tokens = some_tokens(3)
    got = policy_loss(log_probs, tokens, PolicySettings("grpo")).losses
    without = policy_loss(
        log_probs, tokens._replace(reference=None), PolicySettings("grpo")
    ).losses
    np.testing.assert_array_equal(got, without)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_estimates_of_the_kl_and_their_gradients(estimator):
    """k1 has the gradient of k2: its own would be 0 in the mean over samples."""
    d = np.float32([[-2.0, -0.5, 0.0, 0.5, 2.0]])
    ones = np.ones_like(d)
    tokens = SampledTokens(0 * ones, ones, ones > 0, reference=np.full_like(d, -3.0))
    settings = PolicySettings("grpo", kl_coefficient=1.0, kl_estimator=estimator)
    k3 = (np.exp(-d) - 1 + d, 1 - np.exp(-d))
    values, gradients = {"k1": (d, d), "k2": (d**2 / 2, d), "k3": k3}[estimator]
    got = policy_loss(d - 3, tokens, settings)
    np.testing.assert_allclose(got.losses, values, rtol=1e-5, atol=1e-6)
    gradient = jax.grad(lambda p: policy_loss(p, tokens, settings).losses.sum())
    np.testing.assert_allclose(gradient(d - 3), gradients, rtol=1e-5, atol=1e-6)


def test_penalties_of_k1_and_k2_have_the_gradient_of_the_kl_in_the_mean():
    """Over a vocabulary, each token as often as the policy samples it."""
    logits = np.float32([0.3, -1.0, 0.8, 0.1])
    reference = jax.nn.log_softmax(np.float32([-0.5, 0.2, 1.0, 0.0]))

    def exact(logits):
        log_probs = jax.nn.log_softmax(logits)
        return (jnp.exp(log_probs) * (log_probs - reference)).sum()

    expected = jax.grad(exact)(logits)
    shares = jax.nn.softmax(logits)[None]
    ones = np.ones((1, 4), np.float32)
    tokens = SampledTokens(0 * ones, shares, ones > 0, reference=reference[None])
    for estimator in ("k1", "k2"):
        settings = PolicySettings("grpo", kl_coefficient=1.0, kl_estimator=estimator)

        def sampled(logits, settings=settings):
            log_probs = jax.nn.log_softmax(logits)[None]
            return policy_loss(log_probs, tokens, settings).losses.sum()

        got = jax.grad(sampled)(logits)
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)


def test_what_the_sampler_did_not_say_is_not_corrected():
    log_probs, tokens = some_tokens(4)
    settings = PolicySettings("dapo", importance_cap=2.0)
    silent = tokens._replace(sampled=np.full(SHAPE, np.nan, np.float32))
    got = compiled(log_probs, silent, settings)
    agreed = compiled(log_probs, tokens._replace(sampled=tokens.old), settings)
    np.testing.assert_array_equal(got.losses, agreed.losses)
    assert got.sums["mismatch"] == 0.0


@every_algorithm
@pytest.mark.parametrize("gap", [-1e4, -90.0, 90.0, 1e4])
def test_ratios_that_overflow_leave_losses_and_gradients_finite(algorithm, gap):
    ones = np.ones((3, 3), np.float32)
    gains = np.float32([[0], [1], [-1]]) * ones
    tokens = SampledTokens(
        gains, ones, ones > 0, old=-ones, sampled=-ones - gap, reference=-ones
    )
    for estimator in ("k1", "k2", "k3"):
        settings = PolicySettings(
            algorithm,
            kl_coefficient=0.1,
            kl_estimator=estimator,
            importance_cap=2.0,
        )
        value, gradient = jax.value_and_grad(
            lambda p, s=settings: policy_loss(p, tokens, s).losses.sum()
        )(gap * ones)
        assert np.isfinite(value)
        assert np.isfinite(gradient).all()
