# SPDX-License-Identifier: Apache-2.0
"""Rows of completions: what is a target, what a token weighs, and what is stored."""

import numpy as np
import pytest

from tessera.foundations.labels import IGNORE_INDEX
from tessera.train.objectives.policy_losses import ALGORITHMS
from tessera.train.rollouts.rollout import Rollout, learned_rows, rows_of
from tessera.train.rollouts.trajectories import Trajectory

LENGTH = 8


def trajectory(tokens, own=None):
    tokens = np.array(tokens, np.int32)
    is_own = np.ones(len(tokens), bool) if own is None else np.array(own, bool)
    return Trajectory(tokens, -tokens.astype(np.float32), is_own, ended=True)


def row_of(prompt, after):
    rows = rows_of([np.array(prompt, np.int32)], [after], LENGTH)
    return {name: array[0] for name, array in rows.items()}


def test_targets_begin_at_the_last_token_of_the_prompt():
    row = row_of([5, 6, 7], trajectory([8, 9]))
    assert row["tokens"].tolist() == [5, 6, 7, 8, 0, 0, 0, 0]
    assert row["targets"].tolist() == [-100, -100, 8, 9, -100, -100, -100, -100]
    assert row["sampled"].tolist() == [0, 0, -8, -9, 0, 0, 0, 0]
    assert row["segment_ids"].tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    assert row["positions"].tolist() == [0, 1, 2, 3, 0, 0, 0, 0]


def test_a_row_takes_one_token_more_than_it_has_positions():
    row = row_of([1, 2, 3, 4], trajectory([5, 6, 7, 8, 9]))
    assert row["tokens"].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert row["targets"].tolist() == [-100] * 3 + [5, 6, 7, 8, 9]
    assert row["segment_ids"].tolist() == [1] * LENGTH
    with pytest.raises(ValueError, match="broadcast"):
        row_of([1, 2, 3, 4], trajectory([5, 6, 7, 8, 9, 10]))


def test_tokens_that_the_model_did_not_write_are_read_and_not_learned():
    row = row_of([1], trajectory([2, 3, 4, 5], own=[1, 0, 0, 1]))
    assert row["tokens"].tolist() == [1, 2, 3, 4, 0, 0, 0, 0]
    assert row["targets"].tolist() == [2, -100, -100, 5, -100, -100, -100, -100]
    assert row["sampled"].tolist() == [-2, 0, 0, -5, 0, 0, 0, 0]


def test_of_an_empty_completion_nothing_is_learned():
    row = row_of([1, 2], trajectory([]))
    assert row["tokens"].tolist() == [1, 0, 0, 0, 0, 0, 0, 0]
    assert set(row["targets"].tolist()) == {IGNORE_INDEX}
    alone = row_of([1], trajectory([]))
    assert not alone["segment_ids"].any()


def learned(algorithm, lengths, rewards, *, missing=(), masked=(), step=4):
    rows = rows_of(
        [np.array([1], np.int32)] * len(lengths),
        [trajectory([2] * length) for length in lengths],
        LENGTH,
    )
    count = np.arange(len(lengths))
    return learned_rows(
        rows,
        algorithm,
        np.array(rewards, np.float64),
        np.isin(count, missing),
        np.isin(count, masked),
        group_size=2,
        max_tokens=8,
        rows_per_step=step,
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_weights_are_those_of_the_step_that_takes_the_row(algorithm):
    lengths, rewards = [1, 2, 3, 4, 4, 5, 6, 7], [0, 1, 0, 1, 1, 0, 0, 1]
    both = learned(algorithm, lengths, rewards)
    for part in (slice(0, 4), slice(4, 8)):
        own = learned(algorithm, lengths[part], rewards[part])
        np.testing.assert_array_equal(both["weights"][part], own["weights"])


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ("grpo", [1 / 4, 1 / 8, 1 / 12, 1 / 16]),
        ("dr_grpo", [1 / 32] * 4),
        ("dapo", [1 / 10] * 4),
    ],
)
def test_a_token_counts_by_the_rule_of_its_algorithm(algorithm, expected):
    rows = learned(algorithm, [1, 2, 3, 4], [0, 1, 0, 1])
    np.testing.assert_allclose(rows["weights"][:, 0], expected, rtol=1e-6)
    assert (rows["advantages"][:, 0] > 0).tolist() == [False, True, False, True]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_is_missing_or_masked_weighs_nothing(algorithm):
    rewards = [np.nan, 1, 0, 1]
    rows = learned(algorithm, [1, 2, 3, 4], rewards, missing=[0], masked=[3])
    assert (rows["weights"][:, 0] > 0).tolist() == [False, True, True, False]
    assert all(np.isfinite(array).all() for array in rows.values())
    none = learned(algorithm, [1, 2, 0, 4], [np.nan] * 4, missing=[0, 1, 2, 3])
    assert not none["weights"].any()
    assert not none["advantages"].any()


def test_steps_take_one_part_after_the_other_in_every_pass():
    rollout = Rollout({"tokens": np.arange(6).reshape(6, 1)})
    taken = []
    for _ in range(6):
        rows, rollout = rollout.take(2)
        taken.append(rows["tokens"][:, 0].tolist())
    assert taken == [[0, 1], [2, 3], [4, 5]] * 2
    assert rollout.used == 12


def test_what_is_read_is_what_was_written(tmp_path):
    rows = learned("grpo", [1, 2, 3, 8], [0, 1, 0, 1])
    written = Rollout(rows, "form", used=3)
    written.write(tmp_path / "rollout.npz")
    read = Rollout.read(tmp_path / "rollout.npz")
    assert (read.form, read.used) == ("form", 3)
    assert read.arrays.keys() == rows.keys()
    for name, array in rows.items():
        assert read.arrays[name].dtype == array.dtype
        assert read.arrays[name].tobytes() == array.tobytes()
