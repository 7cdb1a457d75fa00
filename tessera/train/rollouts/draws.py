# SPDX-License-Identifier: Apache-2.0
"""Draws tokens from logits, and computes their log-probabilities."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# Probabilities that are added up one by one.
_WIDTH: Final = 128


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("temperature", "top_p"),
    meta_fields=("top_k", "implementation"),
)
@dataclass(frozen=True)
class Draws:
    """How tokens are drawn; ``Sampler`` describes the fields.

    Attributes:
      temperature: A number from 0 up.
      top_p: A number above 0, or None.
      top_k: How many tokens, or None.
      implementation: Of the random numbers, as ``jax.random.key_impl`` gives it.
    """

    temperature: Any
    top_p: Any
    top_k: int | None
    implementation: Any

    def draw(
        self,
        logits: Float[Array, "rows vocab"],
        keys: Array,
        counts: Int[Array, " rows"],
    ) -> tuple[Int[Array, " rows"], Float[Array, " rows"]]:
        """The next token of each row, and its log-probability among all.

        Args:
          logits: f32.
          keys: The data of each row's key, uint32 ``[rows, ...]``.
          counts: The tokens that each row has drawn: with its key, they give the
            random number.
        """
        is_greedy = self.temperature == 0
        most = logits.max(axis=-1, keepdims=True)
        scaled = (logits - most) / jnp.where(is_greedy, 1.0, self.temperature)
        weights = jnp.exp(scaled)
        total = weights.sum(axis=-1)

        def sampled() -> Array:
            typed = jax.random.wrap_key_data(keys, impl=self.implementation)
            own = jax.vmap(jax.random.fold_in)(typed, counts)
            random = jax.vmap(jax.random.uniform)(own)
            if self.top_k is None and self.top_p is None:
                return _draw(weights, random)
            few, ids = jax.lax.top_k(weights, self.top_k or logits.shape[-1])
            if self.top_p is not None:
                shares = few / few.sum(axis=-1, keepdims=True)
                before = jnp.cumsum(shares, axis=-1) - shares
                few = jnp.where(before < self.top_p, few, 0.0)
            return jnp.take_along_axis(ids, _draw(few, random)[:, None], axis=1)[:, 0]

        def likeliest() -> Array:
            # XLA's argmax takes a tenth of a step on CPUs. A row of NaN draws token 0.
            size = logits.shape[-1]
            index = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
            return jnp.where(logits == most, index, size).min(axis=-1) % size

        tokens = jax.lax.cond(is_greedy, likeliest, sampled).astype(jnp.int32)
        chosen = jnp.take_along_axis(scaled, tokens[:, None], axis=1)[:, 0]
        return tokens, chosen - jnp.log(total)


def _draw(
    weights: Float[Array, "rows vocab"], random: Float[Array, " rows"]
) -> Int[Array, " rows"]:
    """An index of each row, by its weights and a number from 0 to 1.

    One random number a row: Gumbel noise for every token took a third of a step on
    CPUs. Sums of few numbers at a time keep the probability of rare tokens.
    """
    rows, size = weights.shape
    padded = jnp.pad(weights, ((0, 0), (0, -size % _WIDTH)))
    groups = padded.reshape(rows, -1, _WIDTH)
    sums = groups.sum(axis=-1)
    group, rest = _first_above(sums, random * sums.sum(axis=-1))
    own = jnp.take_along_axis(groups, group[:, None, None], axis=1)[:, 0]
    return group * _WIDTH + _first_above(own, rest)[0]


def _first_above(
    weights: Float[Array, "rows numbers"], level: Float[Array, " rows"]
) -> tuple[Int[Array, " rows"], Float[Array, " rows"]]:
    """Where the sum of each row's first weights exceeds a level, and what is left.

    Rounding may put the level at the sum of all; the last weight above 0 is then meant.
    """
    sums = jnp.cumsum(weights, axis=-1)
    level = jnp.minimum(level, sums[:, -1] * (1 - 2.0**-23))
    index = jnp.argmax(sums > level[:, None], axis=-1)
    before = jnp.take_along_axis(sums - weights, index[:, None], axis=1)[:, 0]
    return index, level - before
