# SPDX-License-Identifier: Apache-2.0
"""The settings of preference and reward tuning: ``preference.`` and ``grpo.``."""

from dataclasses import dataclass
from typing import Any, Final

from tessera.train.config.setting_fields import setting

NEXT_TOKEN: Final = "next_token"
PREFERENCE: Final = "preference"
POLICY: Final = "policy"
OBJECTIVES: Final = (NEXT_TOKEN, PREFERENCE, POLICY)
PREFERENCE_LOSSES: Final = ("dpo", "ipo", "orpo", "simpo", "kto")
REFERENCES: Final = ("auto", "copy", "adapters_off")
# As the module that has them calls them, which imports JAX; a test compares them.
ALGORITHMS: Final = ("grpo", "dr_grpo", "dapo", "rloo", "gspo", "reinforce++")
# Losses that compare the policy with a reference model.
WITH_REFERENCE: Final = ("dpo", "ipo", "kto")


@dataclass(frozen=True)
class PreferenceConfig:
    """Which loss of pairs, and what it compares with.

    Attributes:
      loss: dpo (arXiv 2305.18290), ipo (2310.12036), orpo (2403.07691), simpo
        (2405.14734) or kto (2402.01306).
      beta: How strongly the policy is held to the reference model; of orpo the weight
        of the odds ratio, of simpo the scale of rewards.
      label_smoothing: For dpo, the share of pairs that are taken to be mislabelled.
      margin: For simpo, by how much the reward of the chosen answer is to exceed that
        of the rejected one.
      reference: The reference model: copy is a second copy of the weights that the run
        begins with, sharded like them; adapters_off is the model without its adapters;
        precomputed scores all data with the weights that the run begins with, before
        its first step; auto is adapters_off with LoRA, else copy.
    """

    loss: str = setting("dpo", choices=PREFERENCE_LOSSES)
    beta: float = setting(0.1, above=0, most=1e6)
    label_smoothing: float = setting(0.0, least=0, below=0.5)
    margin: float = setting(0.5, least=0, most=1e6)
    reference: str = setting("auto", choices=(*REFERENCES, "precomputed"))


@dataclass(frozen=True)
class GrpoConfig:
    """How completions are sampled and rewarded, and how a policy learns from them.

    Attributes:
      algorithm: How rewards become a loss; grpo (arXiv 2402.03300), dr_grpo
        (2503.20783), dapo (2503.14476), rloo (2402.14740), gspo (2507.18071) or
        reinforce++ (2501.03262).
      group_size: Completions of each prompt.
      steps_per_rollout: Optimizer steps that share the completions of one rollout, each
        its own part of them.
      passes: How often the steps of a rollout go through its completions.
      max_completion: The most tokens of a completion; prompts have what remains of
        training.sequence_length.
      temperature: Divides the logits, of the sampler and in the loss.
      clip_low: How far below 1 the ratio of probabilities is clipped; null is what the
        algorithm's paper has, 0.2 for most.
      clip_high: How far above 1; null as well, 0.28 for dapo.
      kl_coefficient: Weight of the divergence from the reference model; 0 needs none.
      kl_estimator: k1, k2 or k3, joschu.net/blog/kl-approx.html.
      reference: As preference.reference, without precomputed: completions are new.
      truncated: What becomes of completions that are cut at max_completion; learn
        counts them like the others, mask learns nothing from them.
      importance_cap: Where the sampler's probabilities differ from the trainer's, weigh
        tokens by their ratio, of at most this (arXiv 2505.24034 calls it truncated
        importance sampling); null does not.
      slots: Completions that are sampled at a time.
      mesh_shape: Sizes and axes of another mesh over the same devices, to sample on;
        weights are moved to it for each rollout. null is the mesh of training.
      environment: A class that answers the model between its turns, module:Class; see
        docs/guides/own-rewards.md. null has one turn.
      max_turns: With an environment, the most turns of the model.
      server: The URL of a vLLM or SGLang server that samples, ending in /v1; null
        samples here.
      server_model: The name of the model that the server serves.
      server_weights: How the server gets the weights before each rollout,
        sglang:/folder or vllm:/folder, which it sees by the same path. vLLM takes
        adapters alone. null gives it none, so that completions are of its own weights.
      reward_weights: One for each of rewards; null is 1 for all.
      reward_time_limit: Seconds for one call of a reward function.
      reward_processes: Processes that reward functions run in.
    """

    algorithm: str = setting("grpo", choices=ALGORITHMS)
    group_size: int = setting(8, least=2, most=1024)
    steps_per_rollout: int = setting(1, least=1, most=1024)
    passes: int = setting(1, least=1, most=1024)
    max_completion: int = setting(256, least=1, most=2**24)
    temperature: float = setting(1.0, above=0, most=100)
    clip_low: float | None = setting(None, above=0, below=1)
    clip_high: float | None = setting(None, above=0, most=100)
    kl_coefficient: float = setting(0.0, least=0, most=1e6)
    kl_estimator: str = setting("k3", choices=("k1", "k2", "k3"))
    reference: str = setting("auto", choices=REFERENCES)
    truncated: str = setting("learn", choices=("learn", "mask"))
    importance_cap: float | None = setting(None, above=0, most=1e6)
    slots: int = setting(64, least=1, most=2**16)
    mesh_shape: list[Any] | None = setting(None)  # noqa: RUF009 - it gives a field
    environment: str | None = setting(None)
    max_turns: int = setting(8, least=1, most=1024)
    server: str | None = setting(None)
    server_model: str = setting("")
    server_weights: str | None = setting(None)
    reward_weights: list[float] | None = setting(None)  # noqa: RUF009 - it gives a field
    reward_time_limit: float = setting(30.0, above=0, most=86_400)
    reward_processes: int = setting(2, least=1, most=1024)

    @property
    def steps_of_a_rollout(self) -> int:
        """Optimizer steps between two rollouts."""
        return self.steps_per_rollout * self.passes
