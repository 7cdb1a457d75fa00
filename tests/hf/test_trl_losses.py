# SPDX-License-Identifier: Apache-2.0
"""Losses and gradients of preferences and of policies beside those of TRL."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tessera.train.objectives import policy_losses, preference_losses
from tessera.train.objectives.policy_losses import (
    PolicySettings,
    SampledTokens,
    policy_loss,
    token_weights,
)
from tessera.train.objectives.preference_losses import Pairs

HERE = Path(__file__).parent
PYTHON = os.environ.get("TESSERA_HF_PYTHON")
pytestmark = pytest.mark.skipif(PYTHON is None, reason="make test-hf has TRL")

ROWS, LENGTH, GROUP = 16, 12, 4
POLICY = {"kl_coefficient": 0.04, "clip": [0.2, 0.2], "max_tokens": LENGTH}
PREFERENCES: dict[str, dict[str, Any]] = {
    "dpo": {"function": "dpo", "loss": "sigmoid", "beta": 0.1},
    "cdpo": {"function": "cpo", "loss": "sigmoid", "beta": 0.1, "label_smoothing": 0.2},
    "ipo": {"function": "dpo", "loss": "ipo", "beta": 0.5},
    "orpo": {"function": "orpo", "beta": 0.25},
    "simpo": {"function": "cpo", "loss": "simpo", "beta": 2.0, "margin": 0.5},
    "kto": {"function": "kto", "beta": 0.1, "kl": 0.3},
    "kto_negative": {"function": "kto", "beta": 0.1, "kl": -0.3},
}
POLICIES: dict[str, dict[str, Any]] = {
    "grpo": {"loss": "grpo", **POLICY},
    "grpo_without_kl": {"loss": "grpo", **POLICY, "kl_coefficient": 0.0},
    "grpo_corrected": {"loss": "grpo", **POLICY, "cap": 1.2},
    "dr_grpo": {"loss": "dr_grpo", **POLICY},
    "dapo": {"loss": "dapo", **POLICY, "clip": [0.2, 0.28]},
    "gspo": {"loss": "gspo", **POLICY, "clip": [0.03, 0.04]},
    "rloo": {"loss": "rloo", **POLICY, "kl_coefficient": 0.0},
}
REWARDS = {
    f"{loss}/{which}": {"function": "advantages", "loss": loss, "rewards": which}
    for loss in ("grpo", "dr_grpo", "rloo")
    for which in ("rewards", "some_rewards")
}


def some_arrays() -> dict[str, np.ndarray]:
    """Log-probabilities of answers of 1 to 12 tokens, two of which are masked whole."""
    draw = np.random.default_rng(0)
    log_probs = -draw.uniform(0.01, 4, (ROWS, LENGTH))
    lengths = draw.integers(1, LENGTH + 1, (ROWS, 1))
    arrays = {
        "log_probs": log_probs,
        "reference": log_probs + 0.3 * draw.normal(size=log_probs.shape),
        "old": log_probs + 0.2 * draw.normal(size=log_probs.shape),
        "sampled": log_probs + 0.2 * draw.normal(size=log_probs.shape),
        "advantages": draw.normal(size=ROWS),
        "mask": np.arange(LENGTH) < lengths,
        "rewards": draw.normal(size=(ROWS // GROUP, GROUP)),
    }
    some = arrays["some_rewards"] = arrays["rewards"].copy()
    some[0, 1] = some[1, :3] = some[2] = np.nan
    some[3] = 1.0
    return {name: array.astype(np.float32) for name, array in arrays.items()}


ARRAYS = some_arrays()


@pytest.fixture(scope="module")
def trl(tmp_path_factory) -> Any:
    """What TRL says of all cases, in one process."""
    assert PYTHON is not None
    folder = tmp_path_factory.mktemp("trl")
    cases = [
        {"function": "policy", "group_size": GROUP, "name": name, **case}
        for name, case in (PREFERENCES | POLICIES | REWARDS).items()
    ]
    (folder / "cases.json").write_text(json.dumps(cases))
    np.savez(folder / "arrays.npz", **ARRAYS)
    names = ("cases.json", "arrays.npz", "results.npz")
    command = [PYTHON, HERE / "trl_losses.py", *(folder / name for name in names)]
    answered = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False
    )
    assert answered.returncode == 0, answered.stderr
    return np.load(folder / "results.npz")


def close(got: Any, expected: np.ndarray) -> None:
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def pairs_of(log_probs: jax.Array) -> Pairs:
    """Those of rows i and i + ROWS / 2, as TRL has them."""
    mask = ARRAYS["mask"]
    summed = (log_probs * mask).sum(1).reshape(2, -1)
    reference = (ARRAYS["reference"] * mask).sum(1).reshape(2, -1)
    tokens = mask.sum(1).astype(np.int32).reshape(2, -1)
    return Pairs(*summed, *reference, *tokens, exists=np.full(ROWS // 2, True))


@pytest.mark.parametrize("name", PREFERENCES)
def test_losses_of_preferences(trl, name):
    case = PREFERENCES[name]
    settings = {
        key: case[key] for key in ("beta", "margin", "label_smoothing") & case.keys()
    }
    if name == "orpo":
        chosen = ARRAYS["mask"][: ROWS // 2].sum()
        settings["pairs_per_token"] = np.float32(ROWS // 2 / chosen)
    if name.startswith("kto"):
        settings["baselines"] = (jnp.float32(case["kl"]),) * 2
    loss = getattr(preference_losses, name.removesuffix("_negative").removeprefix("c"))

    def mean(log_probs):
        results = loss(pairs_of(log_probs), **settings)
        return results.losses.mean(), results[1:]

    graded = jax.value_and_grad(mean, has_aux=True)
    (value, rewards), gradient = graded(ARRAYS["log_probs"])
    close(value, trl[f"{name}/loss"])
    close(gradient, trl[f"{name}/gradient"])
    close([reward.mean() for reward in rewards], trl[f"{name}/logged"])


@pytest.mark.parametrize("name", POLICIES)
def test_losses_of_policies(trl, name):
    case = POLICIES[name]
    mask = ARRAYS["mask"] > 0
    lengths, learned = mask.sum(1), np.full(ROWS, True)
    weights = token_weights(case["loss"], lengths, learned, case["max_tokens"])
    ones = np.ones((1, LENGTH), np.float32)
    tokens = SampledTokens(
        ARRAYS["advantages"][:, None] * ones,
        weights.astype(np.float32)[:, None] * ones,
        mask,
        ARRAYS["old"],
        ARRAYS["sampled"],
        ARRAYS["reference"],
    )
    settings = PolicySettings(
        case["loss"],
        tuple(case["clip"]),
        case["kl_coefficient"],
        importance_cap=case.get("cap"),
    )

    def total(log_probs):
        results = policy_loss(log_probs, tokens, settings)
        return results.losses.sum(), results.sums

    graded = jax.value_and_grad(total, has_aux=True)
    (value, sums), gradient = graded(ARRAYS["log_probs"])
    close(value, trl[f"{name}/loss"])
    close(gradient, trl[f"{name}/gradient"])
    if case["loss"] in ("gspo", "rloo"):
        return  # clip fractions of completions, not of tokens
    logged = [
        float(sums[key]) / lengths.sum()
        for key in ("clipped_low", "clipped_high", "kl")
    ]
    close(logged[: len(trl[f"{name}/logged"])], trl[f"{name}/logged"])


@pytest.mark.parametrize("name", REWARDS)
def test_advantages(trl, name):
    case = REWARDS[name]
    rewards = ARRAYS[case["rewards"]].astype(np.float64)
    got = policy_losses.advantages(case["loss"], rewards, np.isnan(rewards))
    close(got.ravel(), trl[f"{name}/logged"])
