# SPDX-License-Identifier: Apache-2.0
"""``Preference``: learns which of two answers was chosen."""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

from tessera.foundations.labels import IGNORE_INDEX
from tessera.foundations.tree import Tree
from tessera.train.models.model import Batch, Model, Sums
from tessera.train.models.partition_rules import Placement
from tessera.train.objectives.objective import (
    Objective,
    log_probs_of_targets,
    sums_of_segments,
)
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

# A pair has two texts of two tokens, or one of them and a token of the other.
_LEAST_TOKENS = 3


@dataclass(frozen=True)
class Preference(Objective):
    """A loss of pairs that rows hold whole.

    Segments 2k + 1 and 2k + 2 of a row are the chosen and the rejected text of its k-th
    pair; the targets are the tokens of the answers.

    Packing, microbatches and meshes change no loss but that of ``kto``: its baseline is
    of the microbatch, with deterministic numerics of a part of it, and of a device's
    share of it with ``sync_gradients_every``.

    Attributes:
      name: ``dpo``, ``ipo``, ``orpo``, ``simpo`` or ``kto``.
      beta: See ``PreferenceConfig``, as for the others.
      label_smoothing: Of ``dpo``.
      margin: Of ``simpo``.
    """

    name: str
    beta: float
    label_smoothing: float = 0.0
    margin: float = 0.0

    @property
    def sum_names(self) -> tuple[str, ...]:
        """Of each pair its loss, both rewards, their difference, and its sign."""
        return (
            "loss",
            "chosen_reward",
            "rejected_reward",
            "reward_margin",
            "accuracy",
        )

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares the policy with a reference model."""
        return self.name in ("dpo", "ipo", "kto")

    @property
    def arrays(self) -> tuple[str, ...]:
        """Log-probabilities of the targets under the reference model, in nats."""
        return ("reference",) if self.has_reference else ()

    def count(self, batch: Batch) -> Float[Array, ""]:
        """The number of pairs; of ``kto`` a single answer with a label is one."""
        return self._exist(batch).sum(dtype=jnp.float32)

    def prepared(self, batch: Batch) -> Batch:
        """For ORPO, with the pairs of the step over the tokens of chosen answers."""
        if self.name != "orpo":
            return batch
        tokens, _ = self._tokens(batch)
        share = self.count(batch) / jnp.maximum(tokens.sum(dtype=jnp.float32), 1.0)
        of_rows = jnp.broadcast_to(share, batch["tokens"].shape)
        return {**batch, "pairs_per_token": of_rows}

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
        values = log_probs_of_targets(*given)
        chosen, rejected = self._sides(values, batch)
        reference = chosen, rejected
        if self.has_reference:
            reference = self._sides(batch["reference"], batch)
        tokens, exist = self._tokens(batch), self._exist(batch)
        pairs = Pairs(chosen, rejected, *reference, *tokens, exist)
        result = self._losses(pairs, batch)
        margins = result.chosen_rewards - result.rejected_rewards
        each = (
            result.losses,
            result.chosen_rewards,
            result.rejected_rewards,
            margins,
            (margins > 0).astype(jnp.float32),
        )
        totals = (jnp.where(exist, one, 0.0).sum() for one in each)
        return dict(zip(self.sum_names, totals, strict=True))

    def _losses(self, pairs: Pairs, batch: Batch) -> PairLosses:
        beta = self.beta
        match self.name:
            case "dpo":
                return dpo(pairs, beta=beta, label_smoothing=self.label_smoothing)
            case "ipo":
                return ipo(pairs, beta=beta)
            case "orpo":
                share = batch["pairs_per_token"][..., :1]
                return orpo(pairs, beta=beta, pairs_per_token=share)
            case "simpo":
                return simpo(pairs, beta=beta, margin=self.margin)
            case _:
                return kto(pairs, beta=beta, baselines=kto_baselines(pairs))

    def _tokens(self, batch: Batch) -> tuple[Array, Array]:
        """Tokens of both answers of each pair, ``[..., pairs]``, f32."""
        counted = batch["targets"] != IGNORE_INDEX
        return self._sides(counted.astype(jnp.float32), batch)

    def _exist(self, batch: Batch) -> Array:
        """Where a row has a pair, ``[..., pairs]``: its answers have tokens."""
        chosen, rejected = self._tokens(batch)
        if self.name == "kto":
            return (chosen > 0) | (rejected > 0)
        return (chosen > 0) & (rejected > 0)

    def _sides(self, values: Array, batch: Batch) -> tuple[Array, Array]:
        """The sums over both answers of each pair, ``[..., pairs]``."""
        most = 2 * -(-values.shape[-1] // _LEAST_TOKENS)
        sums = sums_of_segments(values, batch, most)
        return sums[..., 0::2], sums[..., 1::2]
