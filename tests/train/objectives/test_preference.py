# SPDX-License-Identifier: Apache-2.0
"""The loss of pairs in rows: beside NumPy, however they are packed, on any mesh."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tessera.foundations.labels import IGNORE_INDEX
from tessera.foundations.tree import named_leaves
from tessera.train.objectives.preference import Preference
from tests.train.loop.post_training_runs import (
    LENGTH,
    ONE,
    ROWS,
    TWO_BY_TWO,
    begun,
    placed,
    preference_run,
)

LOSSES = ("dpo", "ipo", "orpo", "simpo", "kto")
OBJECTIVES = {name: Preference(name, 0.5, 0.0, 0.3) for name in LOSSES}
VOCAB = 264


def draw_pairs(count=7, seed=0):
    """Prompts of one or two tokens, and two answers of one to three."""
    draw = np.random.default_rng(seed)
    ranges = (1, 3), (1, 4), (1, 4)
    sizes = np.stack([draw.integers(*one, count) for one in ranges], axis=1)
    return [[draw.integers(0, VOCAB, n).tolist() for n in size] for size in sizes]


def packed(pairs, rows):
    """The pairs in as many rows, one after the other where there is room."""
    shape = rows, LENGTH
    batch = {
        name: np.zeros(shape, np.int32)
        for name in ("tokens", "segment_ids", "positions")
    }
    batch["targets"] = np.full(shape, IGNORE_INDEX, np.int32)
    used, number = np.zeros(rows, int), np.zeros(rows, int)
    for index, (prompt, *answers) in enumerate(pairs):
        size = sum(len(prompt) + len(answer) for answer in answers)
        row = next(
            r % rows
            for r in range(index, index + rows)
            if used[r % rows] + size <= LENGTH
        )
        for answer in answers:
            ids, at = [*prompt, *answer], used[row]
            own, number[row] = slice(at, at + len(ids)), number[row] + 1
            batch["tokens"][row, own] = ids
            batch["segment_ids"][row, own] = number[row]
            batch["positions"][row, own] = np.arange(len(ids))
            learned = slice(at + len(prompt) - 1, at + len(ids) - 1)
            batch["targets"][row, learned] = answer
            used[row] += len(ids)
    return batch


def with_reference(batch):
    """Log-probabilities of a made-up reference model, the same for equal texts."""
    numbers = -2 - np.sin(batch["tokens"] + 3.0 * batch["targets"]).astype(np.float32)
    return batch | {"reference": np.where(batch["targets"] >= 0, numbers, 0)}


@cache
def model_and_params():
    run = preference_run()
    return run.model, run.model.init(jax.random.key(1), run.mesh)


@jax.jit
def of_microbatch(params, whole, index):
    """Sums, count and gradients of one microbatch, by the name of the loss."""
    model, _ = model_and_params()
    found = {}
    for name, objective in OBJECTIVES.items():
        batch = objective.prepared(whole)
        micro = {key: array[index] for key, array in batch.items()}

        def loss(params, objective=objective, micro=micro):
            return objective.loss(model, params, micro, model.place(None), "none")

        gradients, sums = jax.grad(loss, has_aux=True)(params)
        found[name] = sums, objective.count(micro), gradients
    return found


def of_step(pairs, rows, microbatches):
    """Means and gradients of all pairs, by the name of the loss."""
    _, params = model_and_params()
    batch = with_reference(packed(pairs, rows))
    whole = {n: a.reshape(microbatches, -1, LENGTH) for n, a in batch.items()}
    parts = [of_microbatch(params, whole, i) for i in range(microbatches)]
    total = jax.tree.map(lambda *x: np.sum(x, axis=0), *parts)
    return {
        name: jax.tree.map(lambda x, count=count: x / count, (sums, gradients))
        for name, (sums, count, gradients) in total.items()
    }


@cache
def log_probs(texts):
    """Of each token of texts after those before it, by full logits, in f64."""
    model, params = model_and_params()
    ids = np.zeros((len(texts), LENGTH), np.int32)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = text
    batch = {
        "tokens": jnp.asarray(ids),
        "segment_ids": jnp.ones_like(ids),
        "positions": jnp.broadcast_to(jnp.arange(LENGTH), ids.shape),
    }
    logits_of = jax.jit(
        lambda params, batch: model.logits(params, batch, model.place(None))
    )
    logits = np.asarray(logits_of(params, batch), np.float64)
    logs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    return [logs[row, np.arange(len(t) - 1), t[1:]] for row, t in enumerate(texts)]


def expected(name, pairs):
    """The mean loss and rewards by the papers' formulas, each pair by itself."""
    texts = tuple((*p, *answer) for p, *answers in pairs for answer in answers)
    policy, reference = [], []
    for index, (text, logs) in enumerate(zip(texts, log_probs(texts), strict=True)):
        first = len(pairs[index // 2][0]) - 1
        ids = np.array(text)
        policy.append(logs[first:])
        reference.append((-2 - np.sin(ids[:-1] + 3.0 * ids[1:]))[first:])
    sums = np.array([one.sum() for one in policy]).reshape(-1, 2)
    counts = np.array([one.size for one in policy]).reshape(-1, 2)
    ratios = sums - np.array([one.sum() for one in reference]).reshape(-1, 2)
    means, rewards = sums / counts, 0.5 * ratios
    if name in ("orpo", "simpo"):
        rewards = 0.5 * means
    margin = rewards[:, 0] - rewards[:, 1]
    match name:
        case "dpo":
            losses = np.logaddexp(0, -margin)
        case "ipo":
            each = ratios / counts
            losses = (each[:, 0] - each[:, 1] - 1) ** 2
        case "orpo":
            odds = means - np.log1p(-np.exp(means))
            losses = 0.5 * np.logaddexp(0, odds[:, 1] - odds[:, 0])
            losses = losses - sums[:, 0].sum() / counts[:, 0].sum()
        case "simpo":
            losses = np.logaddexp(0, 0.3 - margin)
        case _:
            baseline = np.maximum(ratios.mean(axis=0), 0)[::-1]
            better, worse = (0.5 * (ratios - baseline)).T
            losses = (1 / (1 + np.exp(better)) + 1 / (1 + np.exp(-worse))) / 2
    means = losses, rewards[:, 0], rewards[:, 1], margin, margin > 0
    return dict(zip(OBJECTIVES[name].sum_names, (x.mean() for x in means), strict=True))


@cache
def in_one_batch():
    return of_step(draw_pairs(), 4, 1)


@pytest.mark.slow(reason="compiles all losses and their gradients once")
@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_is_that_of_full_logits(name):
    sums, _ = in_one_batch()[name]
    for key, value in expected(name, draw_pairs()).items():
        assert float(sums[key]) == pytest.approx(value, rel=2e-6, abs=1e-6), key


@pytest.mark.full
@pytest.mark.parametrize("name", LOSSES)
def test_packing_padding_and_microbatches_change_nothing(name):
    """But for KTO, which compares answers with those of their microbatch."""
    pairs = draw_pairs()
    shuffled = [pairs[i] for i in (3, 0, 6, 2, 5, 1, 4)]
    layouts = {(8, 1): pairs, (4, 1): shuffled}
    if name != "kto":
        layouts |= {(4, 2): shuffled, (8, 8): pairs}  # rows of padding alone, too
    for layout, given in layouts.items():
        means, gradients = of_step(given, *layout)[name]
        one, whole = in_one_batch()[name]
        for key in one:
            assert means[key] == pytest.approx(one[key], rel=1e-5, abs=1e-6), key
        for a, b in zip(
            jax.tree.leaves(gradients), jax.tree.leaves(whole), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def tokens_and_counts(name, batch):
    objective = OBJECTIVES[name]
    batch = {key: jnp.asarray(array) for key, array in batch.items()}
    return float(objective.count(batch)), objective.prepared(batch)


def test_a_pair_needs_both_answers_but_for_kto():
    batch = packed(draw_pairs(4), 4)
    alone = batch["segment_ids"][0] == 2
    batch["targets"][0, alone] = IGNORE_INDEX
    assert [tokens_and_counts(name, batch)[0] for name in ("dpo", "orpo")] == [3, 3]
    assert tokens_and_counts("kto", batch)[0] == 4
    batch["targets"][1] = IGNORE_INDEX
    assert tokens_and_counts("kto", batch)[0] == 3


def test_a_row_may_be_full_of_single_answers():
    """Of two tokens each, beside one of the answer that is not there."""
    batch = packed([], 1)
    shape = 1, LENGTH
    batch["tokens"][:] = np.arange(LENGTH)
    batch["segment_ids"][:] = np.resize([1, 1, 2], shape) + np.arange(LENGTH) // 3 * 2
    batch["targets"][:, 0::3] = np.arange(1, LENGTH + 1)[0::3]
    assert tokens_and_counts("kto", batch)[0] == 6


def test_orpo_divides_by_the_tokens_of_the_whole_step():
    batch = packed(draw_pairs(), 4)
    whole = {name: array.reshape(2, 2, LENGTH) for name, array in batch.items()}
    count, prepared = tokens_and_counts("orpo", whole)
    chosen = sum(len(answer) for _, answer, _ in draw_pairs())
    assert count == 7
    np.testing.assert_allclose(prepared["pairs_per_token"], 7 / chosen, rtol=1e-6)


def trained(run, steps=3):
    """Metrics of some steps with the same pairs, and the parameters after them."""
    state, batch = begun(run), placed(run, packed(draw_pairs(), ROWS))
    numbers = []
    for _ in range(steps):
        full = batch
        if run.score_reference is not None:
            scores = run.score_reference(run.reference_params(state), batch)
            full = batch | {"reference": scores}
        state, metrics = run.step(state, full)
        numbers.append({name: float(value) for name, value in metrics.items()})
    plain = run.model.plain(state.params)
    return numbers, {n: np.asarray(x) for n, x in named_leaves(plain).items()}


@cache
def on_one_device(name):
    return trained(preference_run(name))


MESHES = {
    "fsdp-tp": TWO_BY_TWO,
    "fsdp-cp": ((2, 2), ("fsdp", "cp")),
    "fsdp-pp": ((2, 2), ("fsdp", "pp")),
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        *(("dpo", mesh) for mesh in MESHES),
        ("orpo", "fsdp-tp"),
        ("kto", "fsdp-tp"),
    ],
)
def test_steps_on_a_mesh_are_those_on_one_device(name, mesh):
    numbers, params = trained(preference_run(name, MESHES[mesh]))
    for here, alone in zip(numbers, on_one_device(name)[0], strict=True):
        for key in ("loss", "grad_norm", "reward_margin", "tokens"):
            assert here[key] == pytest.approx(alone[key], rel=1e-4, abs=1e-5), key
    for key, array in on_one_device(name)[1].items():
        np.testing.assert_allclose(params[key], array, rtol=1e-3, atol=1e-5)
    assert numbers[0]["loss"] > numbers[-1]["loss"]


@pytest.mark.full
def test_deterministic_steps_have_the_same_bits_on_a_mesh(optimized):
    fixed = {"numerics": "deterministic", "reduction_parts": 4}
    runs = [preference_run("dpo", mesh, **fixed) for mesh in (ONE, TWO_BY_TWO)]
    (numbers, params), (others, again) = map(trained, runs)
    assert numbers == others
    assert {n: a.tobytes() for n, a in params.items()} == {
        n: a.tobytes() for n, a in again.items()
    }
