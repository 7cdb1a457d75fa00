# SPDX-License-Identifier: Apache-2.0
"""Losses of TRL's trainers on given log-probabilities; run where torch and trl are.

python trl_losses.py CASES.json ARRAYS.npz RESULTS.npz

The methods of the trainers are called as they are. What stands for the trainer has the
settings that they read, one process, and a model that answers with the given arrays.
"""

import json
import sys
from collections import defaultdict
from contextlib import nullcontext
from types import SimpleNamespace as Has
from typing import Any

import numpy as np
import torch


class OneProcess:
    """What trainers use of Accelerate."""

    device = torch.device("cpu")
    num_processes, process_index = 1, 0
    sync_gradients = True

    def gather(self, values: Any) -> Any:
        return values

    gather_for_metrics = gather

    def reduce(self, values: Any, reduction: str) -> Any:
        return values

    def autocast(self) -> Any:
        return nullcontext()


def trainer(**settings: Any) -> Has:
    """What the methods of every trainer read."""
    return Has(
        accelerator=OneProcess(),
        model=Has(training=True),
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        aux_loss_enabled=False,
        **settings,
    )


def with_first(tokens: torch.Tensor) -> torch.Tensor:
    """With a token of the prompt in front, which nothing predicts."""
    return torch.nn.functional.pad(tokens, (1, 0))


def answered(log_probs: torch.Tensor) -> Has:
    """What a model of TRL answers; the rest is only logged."""
    zeros = torch.zeros_like(log_probs)
    return Has(
        log_probs=log_probs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool()
    )


def dpo(case: dict, arrays: dict, log_probs: torch.Tensor) -> Any:
    """DPO and IPO: ``log_probs`` of ``[2 B, S]`` tokens, those chosen first."""
    from trl import DPOTrainer

    mask = arrays["mask"]
    this = trainer(
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[case["loss"]],
        loss_weights=[1.0],
        beta=case["beta"],
        label_smoothing=0.0,
        use_weighting=False,
    )
    inputs = {
        "input_ids": with_first(mask.long()),
        "attention_mask": with_first(mask.long()),
        "completion_mask": with_first(mask.long()),
    }
    summed = (arrays["reference"] * mask).sum(1).chunk(2)
    inputs["ref_chosen_logps"], inputs["ref_rejected_logps"] = summed
    outputs = answered(log_probs * mask)
    loss = DPOTrainer._compute_loss(this, lambda **_: outputs, inputs, False)
    metrics = this._metrics["train"]
    return loss, [metrics[f"rewards/{name}"][0] for name in ("chosen", "rejected")]


def cpo(case: dict, arrays: dict, log_probs: torch.Tensor) -> Any:
    """SimPO; and conservative DPO, which DPOTrainer has not, of log-ratios."""
    from trl.experimental.cpo import CPOTrainer

    this = trainer(
        alpha=0.0,
        beta=case["beta"],
        label_smoothing=case.get("label_smoothing", 0.0),
        loss_type=case["loss"],
        simpo_gamma=case.get("margin", 0.0),
    )
    mask = arrays["mask"]
    if case["loss"] == "simpo":
        sides = ((log_probs * mask).sum(1) / mask.sum(1)).chunk(2)
    else:
        sides = ((log_probs - arrays["reference"]) * mask).sum(1).chunk(2)
    losses, *rewards = CPOTrainer.cpo_loss(this, *sides)
    return losses.mean(), [reward.mean() for reward in rewards]


def orpo(case: dict, arrays: dict, log_probs: torch.Tensor) -> Any:
    from trl.experimental.orpo import ORPOTrainer

    this = trainer(beta=case["beta"])
    mask = arrays["mask"]
    means = ((log_probs * mask).sum(1) / mask.sum(1)).chunk(2)
    losses, *rewards = ORPOTrainer.odds_ratio_loss(this, *means)[:3]
    chosen, chosen_mask = log_probs.chunk(2)[0], mask.chunk(2)[0]
    nll = -chosen[chosen_mask.bool()].mean()
    return nll - losses.mean(), [reward.mean() for reward in rewards]


def kto(case: dict, arrays: dict, log_probs: torch.Tensor) -> Any:
    from trl import KTOTrainer

    mask = arrays["mask"]
    pairs = len(mask) // 2
    baselines = [torch.tensor([case["kl"]]), torch.tensor([0.0])]
    this = trainer(
        calculate_KL=True,
        _compute_kl_logps=lambda *_: baselines.pop(0),
        precompute_ref_logps=True,
        beta=case["beta"],
        loss_type="kto",
        desirable_weight=1.0,
        undesirable_weight=1.0,
    )
    inputs = {
        "input_ids": with_first(mask.long()),
        "attention_mask": with_first(mask.long()),
        "completion_mask": with_first(mask.long()),
        "label": torch.arange(2 * pairs) < pairs,
        "ref_logps": (arrays["reference"] * mask).sum(1),
        "ref_KL_logps": torch.tensor([0.0]),
    }
    outputs = answered(log_probs * mask)
    loss = KTOTrainer._compute_loss(this, lambda **_: outputs, inputs, False)
    metrics = this._metrics["train"]
    return loss, [metrics[f"rewards/{name}"][0] for name in ("chosen", "rejected")]


def policy(case: dict, arrays: dict, log_probs: torch.Tensor) -> Any:
    """GRPO and what GRPOTrainer and RLOOTrainer have beside it."""
    from trl import GRPOTrainer, RLOOTrainer

    loss_type = {"gspo": "grpo"}.get(case["loss"], case["loss"])
    this = trainer(
        loss_type=loss_type,
        importance_sampling_level="sequence" if case["loss"] == "gspo" else "token",
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        beta=case["kl_coefficient"],
        epsilon_low=case["clip"][0],
        epsilon_high=case["clip"][1],
        max_completion_length=case["max_tokens"],
        use_vllm="cap" in case,
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        args=Has(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            log_probs,
            torch.zeros_like(log_probs),
            None,
        ),
    )
    mask = arrays["mask"]
    inputs = {
        "prompt_ids": torch.zeros(len(mask), 1).long(),
        "prompt_mask": torch.ones(len(mask), 1).long(),
        "completion_ids": mask.long(),
        "completion_mask": mask.long(),
        "advantages": arrays["advantages"],
        "old_per_token_logps": arrays["old"],
        "old_logps": (arrays["old"] * mask).sum(1),
        "ref_per_token_logps": arrays["reference"],
        "num_items_in_batch": mask.sum(),
    }
    if "cap" in case:
        differences = (arrays["old"] - arrays["sampled"]) * mask
        ratio = torch.clamp(torch.exp(differences), min=None, max=case["cap"])
        inputs["importance_sampling_ratio"] = ratio
    cls = RLOOTrainer if case["loss"] == "rloo" else GRPOTrainer
    loss = cls._compute_loss(this, None, inputs)
    metrics = this._metrics["train"]
    names = [f"clip_ratio/{side}_mean" for side in ("low", "high")]
    names += ["kl"] if "kl" in metrics else []
    return loss, [metrics[name][0] for name in names]


def advantages(case: dict, arrays: dict, log_probs: torch.Tensor) -> Any:
    """From rewards, NaN where there is none, by the code that scores a rollout."""
    from trl import GRPOTrainer, RLOOTrainer

    rewards = arrays[case["rewards"]].reshape(-1, 1)
    count = len(rewards)
    this = trainer(
        environment_factories=None,
        environments=None,
        tools=None,
        _is_vlm=False,
        _tokenizer=Has(pad_token_id=0, decode=lambda *_, **__: ""),
        processing_class=Has(batch_decode=lambda *_, **__: [""] * count),
        pad_to_multiple_of=None,
        mask_truncated_completions=False,
        beta=0.0,
        num_generations=case["group_size"],
        num_generations_eval=case["group_size"],
        num_iterations=1,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        args=Has(
            per_device_train_batch_size=count,
            steps_per_generation=1,
            gradient_accumulation_steps=1,
            gradient_checkpointing_kwargs=None,
        ),
        _calculate_rewards=lambda *_: rewards,
        reward_weights=torch.ones(1),
        reward_func_names=["reward"],
        reward_funcs=[None],
        multi_objective_aggregation="sum_then_normalize",
        scale_rewards="none" if case["loss"] == "dr_grpo" else "group",
        reward_clip_range=None,
        normalize_advantages=False,
        _logs=defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list)),
        _pending_extra_logs={},
        _pending_metrics={},
        log_multimodal=False,
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            torch.zeros(count, 1),
            None,
            None,
        ),
    )
    this.model.is_gradient_checkpointing = False
    one = [[1]] * count
    if case["loss"] == "rloo":
        this._generate = lambda *_: (one, one, [])
        cls = RLOOTrainer
    else:
        this._generate = lambda *_: (one, one, None, [], None, {}, None, None)
        cls = GRPOTrainer
    scored = cls._generate_and_score_completions(this, [{"prompt": ""}] * count)
    return scored["advantages"].sum(), scored["advantages"]


def main(cases: str, arrays: str, results: str) -> None:
    """For each case its loss, the gradient of ``log_probs``, and what is logged."""
    torch.set_num_threads(1)
    with open(cases, encoding="utf-8") as file:
        asked = json.load(file)
    given = {name: torch.from_numpy(a) for name, a in np.load(arrays).items()}
    answers: dict[str, Any] = {}
    for case in asked:
        log_probs = given["log_probs"].clone().requires_grad_()
        loss, logged = globals()[case["function"]](case, given, log_probs)
        if loss.requires_grad:
            loss.backward()
            answers[f"{case['name']}/gradient"] = log_probs.grad.numpy()
        answers[f"{case['name']}/loss"] = loss.detach().numpy()
        answers[f"{case['name']}/logged"] = np.asarray(logged, np.float32)
    np.savez(results, **answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
