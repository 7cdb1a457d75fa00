# SPDX-License-Identifier: Apache-2.0
"""Losses of completions that were sampled and judged: GRPO and its relatives.

A rollout is judged and weighed on the host, in NumPy and f64: ``advantages`` says how
good each completion was, ``token_weights`` how much each of its tokens counts. The step
then sums ``policy_loss``, and divides it by nothing.

================  ======================  ========================  ================
algorithm         advantage               a token counts            ratio of
================  ======================  ========================  ================
``grpo``          (r - mean) / std        1 / (completions length)  token
``dr_grpo``       r - mean                1 / (completions most)    token
``dapo``          as grpo                 1 / tokens                token
``gspo``          as grpo                 as grpo                   sequence, a mean
``rloo``          r - mean of the others  as grpo                   sequence
``reinforce++``   over the whole batch    as dapo                   token
================  ======================  ========================  ================

Sources: GRPO arXiv 2402.03300, Dr. GRPO 2503.20783, DAPO 2503.14476, GSPO 2507.18071,
RLOO 2402.14740, REINFORCE++ 2501.03262.
"""

from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, Bool, Float

ALGORITHMS: Final = ("grpo", "dr_grpo", "dapo", "gspo", "rloo", "reinforce++")

# How far a ratio may leave 1, below and above, in the papers (Dr. GRPO, RLOO and
# REINFORCE++ have PPO's).
CLIP_RANGES: Final[dict[str, tuple[float, float]]] = {
    **dict.fromkeys(ALGORITHMS, (0.2, 0.2)),
    "dapo": (0.2, 0.28),
    "gspo": (3e-4, 4e-4),
}
# Added to standard deviations, as in TRL: rewards are of the order of 1.
_EPSILON = 1e-4
# Of log-ratios: e^20 is finite, so that an advantage of 0 times it is 0.
_MOST_NATS = 20.0


def advantages(
    algorithm: str,
    rewards: npt.NDArray[np.float64],
    is_missing: npt.NDArray[np.bool_],
) -> npt.NDArray[np.float64]:
    """How much better each completion of a rollout was than was to be expected.

    Completions are compared with those of their group, but by ``reinforce++`` with all
    of the rollout. Standard deviations are those of a sample (n - 1), plus 1e-4.

    Args:
      algorithm: See the table of the module.
      rewards: ``[groups, group_size]``, the completions of a prompt in one row.
      is_missing: Where there is no reward; one that is not finite is missing, too.

    Returns:
      ``[groups, group_size]``: exactly 0 of missing rewards, and where all rewards that
      are compared are the same or there are less than two. No mean or standard
      deviation contains a missing reward.
    """
    shape = rewards.shape
    rewards = np.asarray(rewards, np.float64)
    if algorithm == "reinforce++":
        rewards, is_missing = rewards.reshape(1, -1), is_missing.reshape(1, -1)
    judged = ~is_missing & np.isfinite(rewards)
    count = judged.sum(axis=1, keepdims=True)
    least = np.where(judged, rewards, np.inf)
    least = least.min(axis=1, keepdims=True, initial=np.inf)
    varies = (judged & (rewards > least)).any(axis=1, keepdims=True)
    used = judged & varies
    others = np.maximum(count - 1, 1)
    # Relative to the least: the digits that rewards share are not rounded away.
    relative = np.where(used, rewards - np.where(varies, least, 0.0), 0.0)
    mean = relative.sum(axis=1, keepdims=True) / np.maximum(count, 1)
    above = np.where(used, relative - mean, 0.0)
    if algorithm == "dr_grpo":
        return above
    if algorithm == "rloo":
        # r - (sum - r) / (n - 1), of n completions.
        return above * count / others
    deviation = np.sqrt(np.square(above).sum(axis=1, keepdims=True) / others)
    return (above / (deviation + _EPSILON)).reshape(shape)


def token_weights(
    algorithm: str,
    lengths: npt.NDArray[np.int_],
    learned: npt.NDArray[np.bool_],
    max_tokens: int,
) -> npt.NDArray[np.float64]:
    """What each token of a completion counts in the loss of an optimizer step.

    A completion that is not learned counts nothing, nor does an empty one: those
    without a reward, and, where truncated completions are masked (DAPO's overlong
    filtering), those that did not end by themselves. All are counted as completions,
    so that the last one that is left of a batch does not count as much as all of them.

    Args:
      algorithm: See the table of the module.
      lengths: ``[...]``, tokens that the model wrote, of all completions that the
        optimizer step trains on (in all of its microbatches, on all devices).
      learned: ``[...]``, whether a completion is.
      max_tokens: The most tokens of a completion; only ``dr_grpo`` divides by it.

    Returns:
      ``[...]``, for each completion the weight of any of its tokens.
    """
    tokens = np.where(learned, lengths, 0.0)
    if algorithm == "dr_grpo":
        count = np.full(lengths.shape, lengths.size * max_tokens)
    elif algorithm in ("dapo", "reinforce++"):
        count = np.full(lengths.shape, tokens.sum())
    else:
        count = lengths.size * tokens
    return np.where(tokens > 0, 1 / np.maximum(count, 1), 0.0)


class SampledTokens(NamedTuple):
    """What is known of a microbatch of completions, one in a row, token by token.

    Attributes:
      advantages: Of the token's completion.
      weights: What the token counts.
      mask: Whether the model wrote the token. Of others nothing is read.
      old: Log-probabilities under the policy that the rollout began with, in nats; None
        where each rollout is used once: the policy itself, without a gradient.
      sampled: Those that the sampler had; NaN where it did not say.
      reference: Those under the reference model; None without one.
    """

    advantages: Float[Array, "B S"]
    weights: Float[Array, "B S"]
    mask: Bool[Array, "B S"]
    old: Float[Array, "B S"] | None = None
    sampled: Float[Array, "B S"] | None = None
    reference: Float[Array, "B S"] | None = None


class PolicySettings(NamedTuple):
    """How completions move the policy.

    Attributes:
      algorithm: See the table of the module.
      clip: How far a ratio may leave 1, below and above; see ``CLIP_RANGES``.
      kl_coefficient: Of the penalty; 0 only measures.
      kl_estimator: Schulman's, http://joschu.net/blog/kl-approx.html, of d = log p -
        log reference: ``k1`` is d, ``k2`` d²/2, ``k3`` exp(-d) - 1 + d (TRL's). The
        gradient of k2, d ∇log p, is that of the KL in the mean. ``k3`` has its own,
        (1 - exp(-d)) ∇log p: the same to first order in d, and never above 1. ``k1``
        has that of k2, as its own, ∇log p, is 0 in the mean and would penalize nothing.
      importance_cap: Multiplies each token's loss by min(exp(old - sampled), cap),
        truncated importance sampling, where the sampler's numerics differ from the
        trainer's; None leaves it.
    """

    algorithm: str
    clip: tuple[float, float] = (0.2, 0.2)
    kl_coefficient: float = 0.0
    kl_estimator: str = "k3"
    importance_cap: float | None = None


class PolicyLoss(NamedTuple):
    """What a microbatch of completions says.

    Attributes:
      losses: ``[B, S]`` f32, weighted, 0 where masked: the loss is their sum.
      sums: f32 scalars, over tokens: ``tokens``, how many; ``clipped_low`` and
        ``clipped_high``, how many had no gradient as the ratio had left the range;
        ``kl``, as estimated; ``entropy``, -log p of what was sampled; ``mismatch``,
        ``|sampled - old|``.
    """

    losses: Float[Array, "B S"]
    sums: dict[str, Float[Array, ""]]


def policy_loss(
    log_probs: Float[Array, "B S"], tokens: SampledTokens, settings: PolicySettings
) -> PolicyLoss:
    """The clipped policy loss of completions, one in a row, and their KL penalty.

    The ratio of new to old probability is that of each token; of ``gspo`` the geometric
    mean over the completion (arXiv 2507.18071, equation 7), and of ``rloo`` the
    product, as the completion is one action. Only the policy's part is clipped and
    corrected by importance weights; the KL is added to it, token by token.

    Args:
      log_probs: Log-probabilities of the tokens under the policy, in nats; what is
        differentiated.
      tokens: What else is known of them.
      settings: Static.
    """

    def read(array: Float[Array, "B S"]) -> Float[Array, "B S"]:
        return jnp.where(tokens.mask, array.astype(jnp.float32), 0.0)

    log_probs = read(log_probs)
    fixed = jax.lax.stop_gradient(log_probs)
    old = fixed if tokens.old is None else read(tokens.old)
    ratio = _ratios(settings.algorithm, log_probs - old, tokens.mask)
    gain = read(tokens.advantages)
    low, high = 1 - settings.clip[0], 1 + settings.clip[1]
    losses = -jnp.minimum(ratio * gain, jnp.clip(ratio, low, high) * gain)
    mismatch = kl = jnp.zeros_like(log_probs)
    if tokens.sampled is not None:
        mismatch = jnp.nan_to_num(old - read(tokens.sampled))
        if settings.importance_cap is not None:
            losses *= jnp.minimum(jnp.exp(mismatch), settings.importance_cap)
    if tokens.reference is not None:
        kl = _kl(settings.kl_estimator, log_probs - read(tokens.reference))
        losses += settings.kl_coefficient * kl
    numbers = {
        "tokens": jnp.ones_like(log_probs),
        "clipped_low": (ratio < low) & (gain < 0),
        "clipped_high": (ratio > high) & (gain > 0),
        "kl": kl,
        "entropy": -fixed,
        "mismatch": jnp.abs(mismatch),
    }
    sums = {name: read(jax.lax.stop_gradient(n)).sum() for name, n in numbers.items()}
    return PolicyLoss(read(losses) * read(tokens.weights), sums)


def _ratios(
    algorithm: str, log_ratios: Float[Array, "B S"], mask: Bool[Array, "B S"]
) -> Float[Array, "B S"]:
    """New over old probability, of tokens or of what their completion is."""
    if algorithm in ("gspo", "rloo"):
        total = log_ratios.sum(axis=1, keepdims=True)
        if algorithm == "gspo":
            count = mask.sum(axis=1, keepdims=True, dtype=jnp.float32)
            total /= jnp.maximum(count, 1.0)
        log_ratios = jnp.broadcast_to(total, mask.shape)
    return jnp.exp(jnp.minimum(log_ratios, _MOST_NATS))


def _kl(estimator: str, excess: Float[Array, "B S"]) -> Float[Array, "B S"]:
    """KL to the reference at sampled tokens, with the gradients of ``policy_loss``."""
    if estimator == "k2":
        return jnp.square(excess) / 2
    if estimator == "k3":
        return jnp.exp(jnp.minimum(-excess, _MOST_NATS)) - 1 + excess
    fixed = jax.lax.stop_gradient(excess)
    return fixed * (1 + excess - fixed)
