# SPDX-License-Identifier: Apache-2.0
"""``Policy``: learns from the rewards of what the model itself wrote."""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

from tessera.foundations.labels import IGNORE_INDEX
from tessera.foundations.tree import Tree
from tessera.train.models.model import Batch, Model, Sums, num_targets
from tessera.train.models.partition_rules import Placement
from tessera.train.objectives.objective import Objective, log_probs_of_targets
from tessera.train.objectives.policy_losses import (
    PolicySettings,
    SampledTokens,
    policy_loss,
)

# What a step reports of its tokens, and what ``policy_loss`` calls it.
_MEANS = {
    "kl": "kl",
    "clip_low_fraction": "clipped_low",
    "clip_high_fraction": "clipped_high",
    "entropy": "entropy",
    "sampler_mismatch": "mismatch",
}


@dataclass(frozen=True)
class Policy(Objective):
    """A policy's loss of completions, one in each row; its targets are their tokens.

    Attributes:
      settings: Of the loss.
      temperature: Divides the logits, as in the sampler.
      rows_per_step: Completions of an optimizer step.
      has_old: Whether steps are taken with completions of an older policy.
    """

    settings: PolicySettings
    temperature: float
    rows_per_step: int
    has_old: bool

    @property
    def sum_names(self) -> tuple[str, ...]:
        """The loss, and means over tokens."""
        return ("loss", *self._means)

    @property
    def _means(self) -> dict[str, str]:
        has_kl = self.settings.kl_coefficient > 0
        return {n: of for n, of in _MEANS.items() if has_kl or n != "kl"}

    @property
    def arrays(self) -> tuple[str, ...]:
        """See ``SampledTokens``."""
        has_reference = self.settings.kl_coefficient > 0
        return (
            *("advantages", "weights", "sampled"),
            *(("old",) if self.has_old else ()),
            *(("reference",) if has_reference else ()),
        )

    def count(self, batch: Batch) -> Float[Array, ""]:
        """The share of the step's rows: weights already divide the losses."""
        rows = batch["tokens"].size // batch["tokens"].shape[-1]
        return jnp.float32(rows / self.rows_per_step)

    def prepared(self, batch: Batch) -> Batch:
        """With what the means over the tokens of the step are divided by."""
        share = 1.0 / jnp.maximum(num_targets(batch), 1.0)
        of_rows = jnp.broadcast_to(share, batch["tokens"].shape)
        return {**batch, "token_share": of_rows}

    def sums(
        self,
        model: Model,
        params: Tree,
        hidden: Array,
        batch: Batch,
        place: Placement,
        chunk: int | str,
    ) -> Sums:
        """See ``Objective.sums``."""
        given = model, params, hidden, batch, place, chunk
        values = log_probs_of_targets(*given, self.temperature)
        tokens = SampledTokens(
            batch["advantages"],
            batch["weights"],
            batch["targets"] != IGNORE_INDEX,
            batch.get("old"),
            batch["sampled"],
            batch.get("reference"),
        )
        result = policy_loss(values, tokens, self.settings)
        share = batch["token_share"].max()
        means = {name: result.sums[of] * share for name, of in self._means.items()}
        return {"loss": result.losses.sum(), **means}
