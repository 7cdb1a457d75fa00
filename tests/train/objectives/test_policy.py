# SPDX-License-Identifier: Apache-2.0
"""A policy's step of given completions: beside plain JAX, and with nothing to learn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tessera.foundations.labels import IGNORE_INDEX
from tessera.foundations.tree import named_leaves
from tests.train.loop.post_training_runs import (
    LENGTH,
    begun,
    placed,
    policy_run,
)

ROWS, RATE = 8, 0.5
SETTINGS = {
    "temperature": 1.3,
    "kl_coefficient": 0.2,
    "importance_cap": 1.05,
    "passes": 2,
}


def rows(seed=0):
    """Completions of one to six tokens after prompts of three, judged and weighed."""
    draw = np.random.default_rng(seed)
    ids = draw.integers(0, 264, (ROWS, LENGTH + 1), np.int32)
    lengths = draw.integers(1, 7, ROWS)
    at = np.arange(LENGTH)
    learned = (at >= 2) & (at < 2 + lengths[:, None])
    own = at < 2 + lengths[:, None]

    def noise(scale):
        values = draw.normal(size=(ROWS, LENGTH)) * scale - 5.6
        return np.where(learned, values, 0).astype(np.float32)

    of_rows = np.ones((ROWS, LENGTH), np.float32)
    return {
        "tokens": np.where(own, ids[:, :-1], 0),
        "targets": np.where(learned, ids[:, 1:], IGNORE_INDEX),
        "segment_ids": own.astype(np.int32),
        "positions": np.where(own, at, 0).astype(np.int32),
        "sampled": noise(0.3),
        "old": noise(0.3),
        "reference": noise(0.3),
        "advantages": draw.normal(size=(ROWS, 1)).astype(np.float32) * of_rows,
        "weights": (1 / (ROWS * lengths[:, None])).astype(np.float32) * of_rows,
    }


def plain_loss(params, model, batch):
    """GRPO's loss as the paper writes it, of full logits."""
    logits = model.logits(params, batch, model.place(None)).astype(jnp.float32)
    logs = jax.nn.log_softmax(logits / SETTINGS["temperature"])
    mask = batch["targets"] >= 0
    ids = jnp.where(mask, batch["targets"], 0)[..., None]
    new = jnp.where(mask, jnp.take_along_axis(logs, ids, -1)[..., 0], 0.0)
    ratio, gain = jnp.exp(new - batch["old"]), batch["advantages"]
    losses = -jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.2) * gain)
    losses *= jnp.minimum(jnp.exp(batch["old"] - batch["sampled"]), 1.05)
    apart = batch["reference"] - new
    losses += 0.2 * (jnp.exp(apart) - apart - 1)
    return jnp.where(mask, losses * batch["weights"], 0.0).sum()


def stepped(run, batch):
    """Metrics of one step, the parameters before, and how far they moved."""
    state = begun(run)
    before = {n: np.array(x) for n, x in named_leaves(state.params).items()}
    names = run.abstract_batch.keys()
    state, metrics = run.step(state, placed(run, {n: batch[n] for n in names}))
    after = {n: np.asarray(x) for n, x in named_leaves(state.params).items()}
    moved = {name: before[name] - after[name] for name in before}
    return {n: float(x) for n, x in metrics.items()}, before, moved, int(state.step)


@pytest.fixture(scope="module")
def run():
    return policy_run("no.jsonl", grpo=SETTINGS)


@pytest.mark.slow(reason="compiles the step of a policy, and full logits")
def test_a_step_is_that_of_the_papers_loss(run):
    batch, model = rows(), run.model
    metrics, _, moved, _ = stepped(run, batch)
    given = {name: jnp.asarray(array) for name, array in batch.items()}
    of_params = jax.jit(jax.value_and_grad(lambda p: plain_loss(p, model, given)))
    loss, gradients = of_params(begun(run).params)
    assert metrics["loss"] == pytest.approx(float(loss), rel=1e-5)
    norm = np.sqrt(sum(float((g**2).sum()) for g in jax.tree.leaves(gradients)))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    scale = RATE * min(1.0, run.config.training.clip_norm / norm)
    for name, gradient in named_leaves(gradients).items():
        np.testing.assert_allclose(moved[name], scale * gradient, rtol=1e-3, atol=1e-6)
    learned = batch["targets"] >= 0
    apart = np.abs(batch["old"] - batch["sampled"])[learned].mean()
    assert metrics["sampler_mismatch"] == pytest.approx(apart, rel=1e-5)
    assert 0 < metrics["clip_low_fraction"] + metrics["clip_high_fraction"] < 1


def test_without_rewards_a_step_counts_and_moves_nothing(run):
    batch = rows()
    batch["weights"][:] = 0
    metrics, _, moved, step = stepped(run, batch)
    assert (metrics["loss"], metrics["grad_norm"], step) == (0, 0, 1)
    assert not any(array.any() for array in moved.values())


def test_completions_of_padding_alone_are_no_division_by_zero(run):
    batch = rows()
    batch["targets"][:] = IGNORE_INDEX
    metrics, _, moved, _ = stepped(run, batch)
    assert all(np.isfinite(list(metrics.values())))
    assert not any(array.any() for array in moved.values())


@pytest.mark.slow(reason="compiles the step of a policy")
def test_groups_without_variance_have_no_gradient():
    one = policy_run("no.jsonl")
    batch = rows()
    batch["advantages"][:] = 0
    metrics, _, moved, step = stepped(one, batch)
    assert (metrics["grad_norm"], step) == (0, 1)
    assert not any(array.any() for array in moved.values())


@pytest.mark.full
@pytest.mark.parametrize(
    "axes", [("fsdp", "tp"), ("fsdp", "cp"), ("fsdp", "pp")], ids=str
)
def test_a_step_on_a_mesh_is_that_on_one_device(run, axes):
    here, *_ = stepped(policy_run("no.jsonl", ((2, 2), axes), SETTINGS), rows())
    alone, *_ = stepped(run, rows())
    for name in alone:
        assert here[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-6), name
