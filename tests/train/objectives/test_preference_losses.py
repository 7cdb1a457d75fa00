# SPDX-License-Identifier: Apache-2.0
"""Losses of pairs: the papers' formulas in NumPy, gradients, masks, extremes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.train.objectives.preference_losses import (
    PairLosses,
    Pairs,
    dpo,
    ipo,
    kto,
    kto_baselines,
    orpo,
    simpo,
)

PAIRS_PER_TOKEN = 0.07
BASELINES = (jnp.float32(0.4), jnp.float32(-3.0))
LOSSES = {
    "dpo": partial(dpo, beta=0.1),
    "cdpo": partial(dpo, beta=0.3, label_smoothing=0.2),
    "ipo": partial(ipo, beta=0.5),
    "orpo": partial(orpo, beta=0.25, pairs_per_token=PAIRS_PER_TOKEN),
    "simpo": partial(simpo, beta=2.0, margin=0.5),
    "kto": partial(kto, beta=0.1, baselines=BASELINES),
}
COMPILED = {name: jax.jit(loss) for name, loss in LOSSES.items()}
every_loss = pytest.mark.parametrize("name", LOSSES)


def formula(name: str, pairs: Pairs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The papers' losses and rewards of existing pairs, in NumPy and f64."""

    def surprise(margin, smoothing=0.0):
        right, wrong = np.logaddexp(0, -margin), np.logaddexp(0, margin)
        return (1 - smoothing) * right + smoothing * wrong

    c, r, ref_c, ref_r, n_c, n_r = (np.asarray(a, np.float64) for a in pairs[:6])
    chosen, rejected = c - ref_c, r - ref_r
    mean_c, mean_r = c / n_c, r / n_r
    match name:
        case "dpo":
            losses = surprise(0.1 * (chosen - rejected))
            return losses, 0.1 * chosen, 0.1 * rejected
        case "cdpo":
            losses = surprise(0.3 * (chosen - rejected), 0.2)
            return losses, 0.3 * chosen, 0.3 * rejected
        case "ipo":
            losses = (chosen / n_c - rejected / n_r - 1 / (2 * 0.5)) ** 2
            return losses, 0.5 * chosen, 0.5 * rejected
        case "orpo":
            odds = np.exp(mean_c) / -np.expm1(mean_c)
            odds /= np.exp(mean_r) / -np.expm1(mean_r)
            losses = 0.25 * surprise(np.log(odds)) - PAIRS_PER_TOKEN * c
            return losses, 0.25 * mean_c, 0.25 * mean_r
        case "simpo":
            losses = surprise(2 * mean_c - 2 * mean_r - 0.5)
            return losses, 2 * mean_c, 2 * mean_r
    worth = 1 / (1 + np.exp(-0.1 * (chosen - 0.4)))
    waste = 1 / (1 + np.exp(-0.1 * (0.0 - rejected)))
    return ((1 - worth) + (1 - waste)) / 2, 0.1 * chosen, 0.1 * rejected


def some_pairs(seed: int, shape: tuple[int, ...], scale: float = 1.0) -> Pairs:
    """Answers of 1 to 40 tokens, whose tokens have 0.05 to 3 nats times the scale."""
    draw = np.random.default_rng(seed)
    tokens = draw.integers(1, 40, (2, *shape)).astype(np.int32)
    log_probs = -draw.uniform(0.05, 3, (2, 2, *shape)) * tokens * scale
    policy, reference = log_probs.astype(np.float32)
    exists = draw.uniform(size=shape) < 0.8
    return Pairs(*policy, *reference, *tokens, exists=exists)


def check(name: str, pairs: Pairs) -> None:
    got, expected = COMPILED[name](pairs), formula(name, pairs)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.shape == pairs.exists.shape
        assert ours.dtype == jnp.float32
        theirs = np.where(pairs.exists, theirs, 0)
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


@every_loss
@pytest.mark.parametrize("shape", [(64,), (2, 3, 5), ()], ids=str)
def test_losses_and_rewards_are_those_of_the_papers(name, shape):
    check(name, some_pairs(1, shape))


@pytest.mark.full
@every_loss
@given(seed=st.integers(0, 2**32), scale=st.floats(1e-3, 3))
def test_drawn_pairs(name, seed, scale):
    check(name, some_pairs(seed, (64,), scale))


@every_loss
def test_gradients_are_those_of_the_formula(name):
    pairs = some_pairs(2, (64,))
    summed = jax.jit(jax.grad(lambda p: LOSSES[name](p).losses.sum(), allow_int=True))
    got = summed(pairs)
    for which in ("chosen", "rejected"):
        log_probs, step = np.asarray(getattr(pairs, which), np.float64), 1e-5
        above, below = (
            formula(name, pairs._replace(**{which: log_probs + sign * step}))[0]
            for sign in (1, -1)
        )
        expected = np.where(pairs.exists, (above - below) / (2 * step), 0)
        np.testing.assert_allclose(getattr(got, which), expected, rtol=1e-4, atol=1e-6)


@every_loss
def test_rewards_and_missing_pairs_have_no_gradient(name):
    def rewards(pairs):
        results = LOSSES[name](pairs)
        return results.chosen_rewards.sum() + results.rejected_rewards.sum()

    pairs = some_pairs(3, (8,))
    for gradient in jax.grad(rewards, allow_int=True)(pairs)[:4]:
        assert not np.any(gradient)


@every_loss
@pytest.mark.parametrize("unread", [np.nan, np.inf, -np.inf, 0.0], ids=str)
def test_nothing_of_a_missing_pair_is_read(name, unread):
    exists = np.array([True, False, True])
    pairs = some_pairs(4, (3,))._replace(exists=exists)
    log_probs = [np.where(exists, a, np.float32(unread)) for a in pairs[:4]]
    tokens = [np.where(exists, a, 0) for a in pairs[4:6]]
    holes = Pairs(*log_probs, *tokens, exists=exists)
    loss = jax.value_and_grad(lambda p: LOSSES[name](p).losses.sum(), allow_int=True)
    (expected, gradients), (got, of_holes) = loss(pairs), loss(holes)
    assert got == expected
    for ours, theirs in zip(of_holes[:4], gradients[:4], strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert ours[1] == 0.0


# Summed over an answer of ten tokens: certain, nearly so, and as good as impossible.
EXTREMES = [0.0, -1e-30, -1e-8, -1e-6, -1e-3, -1.0, -1e3, -1e6]


@every_loss
def test_extreme_log_probabilities_have_finite_losses_and_gradients(name):
    chosen, rejected = np.meshgrid(np.float32(EXTREMES), np.float32(EXTREMES))
    zeros, tens = np.zeros_like(chosen), np.full(chosen.shape, 10, np.int32)
    pairs = Pairs(chosen, rejected, zeros, zeros, tens, tens, np.full(tens.shape, True))
    loss = jax.value_and_grad(lambda p: LOSSES[name](p).losses.sum(), allow_int=True)
    value, gradients = loss(pairs)
    assert np.isfinite(value)
    assert all(np.isfinite(gradient).all() for gradient in gradients[:2])


@every_loss
def test_an_answer_without_tokens_is_certain(name):
    zeros, nothing = np.zeros(1, np.float32), np.zeros(1, np.int32)
    rejected = np.full(1, -3.0, np.float32)
    pairs = Pairs(zeros, rejected, zeros, rejected, nothing, nothing, np.full(1, True))
    loss = jax.value_and_grad(lambda p: LOSSES[name](p).losses.sum(), allow_int=True)
    value, gradients = loss(pairs)
    assert np.isfinite([value, *gradients[0], *gradients[1]]).all()


def test_odds_of_probable_answers_are_exact():
    """Where 1 - p is less than f32 has digits for beside 1."""
    chosen, rejected = np.float32([-1e-5, -1e-4]), np.float32([-1e-3, -1e-6])
    zeros, ones = np.zeros(2, np.float32), np.ones(2, np.int32)
    pairs = Pairs(chosen, rejected, zeros, zeros, ones, ones, np.full(2, True))
    losses = orpo(pairs, beta=1.0, pairs_per_token=0.0).losses
    np.testing.assert_allclose(losses, [np.log1p(1e-2), np.log1p(1e2)], rtol=1e-3)


@pytest.mark.parametrize("rows", [1, 2, 3, 6], ids=str)
def test_orpo_of_microbatches_is_the_mean_of_pairs_and_of_tokens(rows):
    """The NLL is a mean over tokens, the odds ratio one over pairs, in any packing."""
    pairs = some_pairs(5, (6, 4))
    chosen, tokens = (np.where(pairs.exists, a, 0) for a in (pairs[0], pairs[4]))
    count = pairs.exists.sum()
    share = np.float32(count / tokens.sum())
    total = 0.0
    for start in range(0, 6, rows):
        micro = Pairs(*(array[start : start + rows] for array in pairs))
        losses = orpo(micro, beta=0.25, pairs_per_token=share).losses
        total += float(losses.sum())
    odds = float(orpo(pairs, beta=0.25, pairs_per_token=0.0).losses.sum())
    expected = odds / count - chosen.sum() / tokens.sum()
    np.testing.assert_allclose(total / count, expected, rtol=1e-5)


def test_packing_changes_no_pair():
    pairs = some_pairs(6, (4, 6))
    for loss in LOSSES.values():
        flat = loss(Pairs(*(array.reshape(24) for array in pairs)))
        packed = loss(pairs)
        for ours, theirs in zip(packed, flat, strict=True):
            np.testing.assert_array_equal(ours.reshape(24), theirs)


def test_pairs_in_bf16_are_compared_in_f32():
    pairs = some_pairs(7, (16,))
    low = pairs._replace(chosen=jnp.asarray(pairs.chosen, jnp.bfloat16))
    same = low._replace(chosen=low.chosen.astype(jnp.float32))
    got, expected = dpo(low, beta=0.1), dpo(same, beta=0.1)
    np.testing.assert_array_equal(got.losses, expected.losses)


def test_single_answers_with_labels():
    """Whatever the log-probability of the answer that has no tokens."""
    ratios, tokens = np.float32([1.0, -2.0, 3.0, 4.0]), np.array([2, 0, 0, 5])
    is_chosen, nothing = tokens > 0, np.zeros(4, np.float32)
    single = Pairs(
        np.where(is_chosen, ratios, np.nan),
        np.where(is_chosen, np.nan, ratios),
        *(nothing, nothing, tokens, np.where(is_chosen, 0, 3)),
        exists=np.arange(4) < 3,
    )
    baselines = jnp.float32(0.25), jnp.float32(0.5)

    def total(chosen):
        results = kto(single._replace(chosen=chosen), beta=0.5, baselines=baselines)
        return results.losses.sum(), results

    (_, got), gradient = jax.value_and_grad(total, has_aux=True)(single.chosen)
    worth = 1 / (1 + np.exp(-0.5 * np.array([0.75, 2.5, -2.5])))
    np.testing.assert_allclose(got.losses, [*(1 - worth), 0], rtol=1e-6)
    np.testing.assert_allclose(got.chosen_rewards, [0.5, 0.0, 0.0, 0.0])
    np.testing.assert_allclose(got.rejected_rewards, [0.0, -1.0, 1.5, 0.0])
    slope = -0.5 * worth[0] * (1 - worth[0])
    np.testing.assert_allclose(gradient, [slope, 0.0, 0.0, 0.0], rtol=1e-6)
    of_others = kto_baselines(single)
    np.testing.assert_allclose(of_others, [0.5, 1.0])


def test_a_baseline_has_no_gradient_and_is_never_negative():
    pairs = some_pairs(10, (4,))

    def losses(baseline):
        return kto(pairs, beta=1.0, baselines=(baseline, baseline)).losses.sum()

    assert jax.grad(losses)(jnp.float32(0.5)) == 0.0
    assert losses(jnp.float32(-4.0)) == losses(jnp.float32(0.0))


def test_baselines_are_the_mean_log_ratios_of_the_other_answers():
    pairs = some_pairs(8, (3, 7), scale=0.1)
    exists = pairs.exists
    chosen = (pairs.chosen - pairs.reference_chosen)[exists].mean()
    rejected = (pairs.rejected - pairs.reference_rejected)[exists].mean()
    got = kto_baselines(pairs)
    np.testing.assert_allclose(got, [max(rejected, 0), max(chosen, 0)], rtol=1e-4)
    nothing = pairs._replace(exists=np.zeros_like(exists), chosen=pairs.chosen * np.nan)
    assert kto_baselines(nothing) == (0.0, 0.0)


def test_no_pairs_at_all_are_a_loss_of_0():
    pairs = Pairs(*(array[:0] for array in some_pairs(9, (4,))))
    for loss in LOSSES.values():
        assert isinstance(loss(pairs), PairLosses)
        assert loss(pairs).losses.sum() == 0.0
