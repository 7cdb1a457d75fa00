# SPDX-License-Identifier: Apache-2.0
"""Losses of pairs of answers, of which one was preferred, from log-probabilities.

Each takes the pairs of a microbatch and returns the loss of every pair. The caller adds
them up, and divides the sum by the number of pairs of the whole batch: so that neither
packing, microbatches nor meshes change what a pair counts.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# Nearer to 1 than this, f32 does not tell a probability from 1: -log p of an answer.
_LEAST_SURPRISE = 2.0**-24


class Pairs(NamedTuple):
    """Pairs of answers to the same prompt; all arrays have one shape, of any rank.

    Attributes:
      chosen: Log-probability of the chosen answer under the policy, in nats, summed
        over its tokens (the end of turn included, the prompt left out).
      rejected: The same of the rejected answer.
      reference_chosen: The same of the chosen answer under the reference model.
      reference_rejected: Of the rejected one. Both are ignored by ORPO and SimPO.
      chosen_tokens: How many tokens the log-probability of the chosen answer sums.
      rejected_tokens: The same of the rejected answer.
      exists: False where there is no pair: its loss, rewards and gradients are 0,
        whatever the other arrays hold.
    """

    chosen: Float[Array, "..."]
    rejected: Float[Array, "..."]
    reference_chosen: Float[Array, "..."]
    reference_rejected: Float[Array, "..."]
    chosen_tokens: Int[Array, "..."]
    rejected_tokens: Int[Array, "..."]
    exists: Bool[Array, "..."]


class PairLosses(NamedTuple):
    """What a loss says of each pair, in f32 and the shape of the pairs.

    Attributes:
      losses: To be summed.
      chosen_rewards: Implicit reward of the chosen answer, without a gradient.
      rejected_rewards: Of the rejected one; the pair's margin is the difference.
    """

    losses: Float[Array, "..."]
    chosen_rewards: Float[Array, "..."]
    rejected_rewards: Float[Array, "..."]


def dpo(pairs: Pairs, *, beta: float, label_smoothing: float = 0.0) -> PairLosses:
    """Direct preference optimization, arXiv 2305.18290, equation 7.

    Args:
      pairs: With reference.
      beta: Strength of the KL penalty; larger stays nearer to the reference.
      label_smoothing: Probability that a pair is the wrong way round, in [0, 0.5):
        conservative DPO, https://ericmitchell.ai/cdpo.pdf.

    Returns:
      Losses ``-log sigmoid`` of the margin; rewards ``beta * log(policy / reference)``.
    """
    pairs = _readable(pairs)
    chosen, rejected = (beta * ratio for ratio in _log_ratios(pairs))
    losses = _of_margin(chosen - rejected, label_smoothing)
    return _results(pairs, losses, chosen, rejected)


def ipo(pairs: Pairs, *, beta: float) -> PairLosses:
    """Identity preference optimization, arXiv 2310.12036, equation 17.

    Log-ratios are means over an answer's tokens, as in the paper's experiments and in
    TRL: a sum would ask for the same margin of long answers and of short ones.

    Args:
      pairs: With reference.
      beta: The paper's tau: the margin aimed at is ``1 / (2 beta)`` nats a token.

    Returns:
      Squared distances from that margin; rewards as those of ``dpo``.
    """
    pairs = _readable(pairs)
    chosen, rejected = _log_ratios(pairs)
    margin = chosen / pairs.chosen_tokens - rejected / pairs.rejected_tokens
    losses = jnp.square(margin - 1 / (2 * beta))
    return _results(pairs, losses, beta * chosen, beta * rejected)


def orpo(
    pairs: Pairs, *, beta: float, pairs_per_token: float | Float[Array, ""]
) -> PairLosses:
    """Odds-ratio preference optimization, arXiv 2403.07691, equations 6 and 7.

    The loss has two means, that of the odds ratio over pairs and the NLL of the chosen
    answers over tokens. Multiplied by ``pairs_per_token``, the NLL of a pair is divided
    by the number of pairs as the rest is, and becomes the mean over tokens.

    Args:
      pairs: Of a microbatch.
      beta: The paper's lambda.
      pairs_per_token: Pairs over tokens of chosen answers, both of the whole batch.

    Returns:
      Losses; rewards are ``beta`` times the mean log-probabilities of tokens.
    """
    pairs = _readable(pairs)
    chosen, rejected = _token_means(pairs)
    log_odds = chosen - rejected - _log1mexp(chosen) + _log1mexp(rejected)
    losses = beta * _of_margin(log_odds) - pairs_per_token * pairs.chosen
    return _results(pairs, losses, beta * chosen, beta * rejected)


def simpo(pairs: Pairs, *, beta: float, margin: float) -> PairLosses:
    """Simple preference optimization, arXiv 2405.14734, equation 6.

    Args:
      pairs: Of which mean log-probabilities of tokens are compared.
      beta: Scale of the rewards, 2 to 10.
      margin: The paper's gamma, in units of the rewards: what the chosen answer's
        should be larger by, often 0.3 to 1.6.

    Returns:
      Losses; rewards are ``beta`` times the mean log-probabilities of tokens.
    """
    pairs = _readable(pairs)
    chosen, rejected = (beta * mean for mean in _token_means(pairs))
    losses = _of_margin(chosen - rejected - margin)
    return _results(pairs, losses, chosen, rejected)


def kto(
    pairs: Pairs,
    *,
    beta: float,
    baselines: tuple[Float[Array, "..."], Float[Array, "..."]],
) -> PairLosses:
    """Kahneman-Tversky optimization of pairs, arXiv 2402.01306.

    Args:
      pairs: With reference. An answer without tokens does not exist: so a single one
        with a label is a pair, too. The loss of a pair is the mean of its answers'.
      beta: As that of ``dpo``: larger saturates sooner.
      baselines: KL of the policy to the reference, in nats, with which the chosen and
        the rejected answers are compared; ``kto_baselines`` estimates them. They have
        no gradient, and count as 0 where they are negative.

    Returns:
      Losses; rewards as those of ``dpo``.
    """
    answers, ratios = _answers(pairs), jnp.stack(_log_ratios(_readable(pairs)))
    chosen, rejected = jnp.where(answers, ratios, 0.0)
    of_chosen, of_rejected = (
        jax.lax.stop_gradient(jnp.maximum(baseline, 0.0)) for baseline in baselines
    )
    # How far each answer is on the wrong side of its baseline.
    wrong = jnp.stack([of_chosen - chosen, rejected - of_rejected])
    losses = jnp.where(answers, jax.nn.sigmoid(beta * wrong), 0.0)
    count = jnp.maximum(answers.sum(axis=0, dtype=jnp.float32), 1.0)
    return _results(pairs, losses.sum(axis=0) / count, beta * chosen, beta * rejected)


def kto_baselines(pairs: Pairs) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Estimates of the KL to the reference from the other answers of a microbatch.

    Chosen answers are compared with the mean log-ratio of the rejected ones, and the
    other way round. The paper's estimate is that of answers to other prompts, which
    need a forward pass of their own. The means are over the microbatch, as TRL's.

    Returns:
      Baselines of chosen and of rejected answers, f32 scalars of at least 0, without a
      gradient; 0 where there is no answer to compare with.
    """
    log_ratios, answers = jnp.stack(_log_ratios(_readable(pairs))), _answers(pairs)
    sums = jnp.where(answers, log_ratios, 0.0).reshape(2, -1).sum(axis=1)
    counts = answers.reshape(2, -1).sum(axis=1, dtype=jnp.float32)
    means = jnp.maximum(sums / jnp.maximum(counts, 1.0), 0.0)
    chosen, rejected = jax.lax.stop_gradient(means)
    return rejected, chosen


def _readable(pairs: Pairs) -> Pairs:
    """The pairs in f32; those that do not exist have numbers of which none is special.

    Selected before they are used, as well as after: else NaN times 0 is a gradient.
    """

    def select(array: Array, missing: float) -> Float[Array, "..."]:
        return jnp.where(pairs.exists, array.astype(jnp.float32), missing)

    log_probs = [select(array, -1.0) for array in pairs[:4]]
    tokens = [jnp.maximum(select(array, 1.0), 1.0) for array in pairs[4:6]]
    return Pairs(*log_probs, *tokens, exists=pairs.exists)


def _answers(pairs: Pairs) -> Bool[Array, "2 ..."]:
    """Which chosen and which rejected answers exist, for KTO."""
    return jnp.stack([pairs.exists & (tokens > 0) for tokens in pairs[4:6]])


def _log_ratios(pairs: Pairs) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Logs of policy over reference, of the chosen and of the rejected answers."""
    chosen = pairs.chosen - pairs.reference_chosen
    return chosen, pairs.rejected - pairs.reference_rejected


def _token_means(pairs: Pairs) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Log-probabilities of the chosen and of the rejected answers, a token."""
    chosen = pairs.chosen / pairs.chosen_tokens
    return chosen, pairs.rejected / pairs.rejected_tokens


def _of_margin(
    margin: Float[Array, "..."], label_smoothing: float = 0.0
) -> Float[Array, "..."]:
    """Cross-entropy of "the chosen answer is the better one", with its log-odds."""
    is_right, is_wrong = jax.nn.softplus(-margin), jax.nn.softplus(margin)
    return (1 - label_smoothing) * is_right + label_smoothing * is_wrong


def _log1mexp(log_probs: Float[Array, "..."]) -> Float[Array, "..."]:
    """``log(1 - p)``, of a probability that is 1 in f32 that of the next smaller."""
    return jax.nn.log1mexp(jnp.maximum(-log_probs, _LEAST_SURPRISE))


def _results(
    pairs: Pairs,
    losses: Float[Array, "..."],
    chosen: Float[Array, "..."],
    rejected: Float[Array, "..."],
) -> PairLosses:
    """Losses and rewards, 0 where no pair exists."""
    rewards = (jnp.where(pairs.exists, r, 0.0) for r in (chosen, rejected))
    rewards = (jax.lax.stop_gradient(reward) for reward in rewards)
    return PairLosses(jnp.where(pairs.exists, losses, 0.0), *rewards)
