# SPDX-License-Identifier: Apache-2.0
"""The objective that the settings of a run describe, and its reference model."""

from tessera.errors import SettingConflictError
from tessera.foundations.tree import named_leaves
from tessera.train.config.post_training_config import POLICY, PREFERENCE
from tessera.train.config.run_config import Config
from tessera.train.data import Corpus
from tessera.train.data.record_rows import PreferenceRows
from tessera.train.models.model import Model
from tessera.train.objectives.objective import NEXT_TOKEN, Objective
from tessera.train.objectives.policy import Policy
from tessera.train.objectives.policy_losses import CLIP_RANGES, PolicySettings
from tessera.train.objectives.preference import Preference

COPY = "copy"
ADAPTERS_OFF = "adapters_off"
PRECOMPUTED = "precomputed"


def objective_of(config: Config, rows_per_step: int) -> Objective:
    """What a step differentiates.

    Args:
      config: Of the run.
      rows_per_step: Sequences that one optimizer step learns from.
    """
    if config.training.objective == PREFERENCE:
        of = config.preference
        return Preference(of.loss, of.beta, of.label_smoothing, of.margin)
    if config.training.objective == POLICY:
        grpo = config.grpo
        low, high = CLIP_RANGES[grpo.algorithm]
        settings = PolicySettings(
            grpo.algorithm,
            (
                low if grpo.clip_low is None else grpo.clip_low,
                high if grpo.clip_high is None else grpo.clip_high,
            ),
            grpo.kl_coefficient,
            grpo.kl_estimator,
            grpo.importance_cap,
        )
        has_old = grpo.steps_of_a_rollout > 1
        return Policy(settings, grpo.temperature, rows_per_step, has_old)
    return NEXT_TOKEN


def reference_of(config: Config, objective: Objective, model: Model) -> str | None:
    """The reference model: ``copy``, ``adapters_off`` or ``precomputed``, or None.

    Raises:
      SettingConflictError: [T507] without its adapters the model would not be what the
        run begins with.
    """
    if "reference" not in objective.arrays:
        return None
    is_policy = config.training.objective == POLICY
    named = (config.grpo if is_policy else config.preference).reference
    others = named_leaves(model.abstract()).keys() - model.frozen - model.adapters
    if named == "auto":
        return ADAPTERS_OFF if model.adapters and not others else COPY
    if named == ADAPTERS_OFF and (others or not model.adapters):
        group = "grpo" if is_policy else "preference"
        raise SettingConflictError(
            "the model without its adapters is no reference model of this run",
            got=f"{group}.reference=adapters_off, and the run trains {min(others)}",
            fix=f"train adapters alone: model.lora.rank=16; or write {group}."
            "reference=copy, which holds the weights twice",
        )
    return named


def check_pairs(corpus: Corpus, loss: str) -> None:
    """See that each record of preferences has both answers, where a loss needs them.

    Raises:
      SettingConflictError: [T507] some have one answer with a label.
    """
    if loss == "kto":
        return
    sides = [r for s in corpus.sources for r in (s.train_rows, s.validation_rows)]
    rows = [side for side in sides if isinstance(side, PreferenceRows)]
    if single := sum(side.num_labelled for side in rows):
        raise SettingConflictError(
            f"preference.loss={loss} compares two answers to a prompt",
            got=f"{single:,} of {sum(side.num_pairs for side in rows):,} records have "
            "one answer with a label",
            fix="write preference.loss=kto, or use records with both answers",
        )
