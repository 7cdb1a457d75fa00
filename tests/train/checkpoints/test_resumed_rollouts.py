# SPDX-License-Identifier: Apache-2.0
"""Runs that stop in the middle of a rollout's steps go on with its completions."""

from pathlib import Path

import jax
import numpy as np
import pytest

from tessera.errors import CheckpointMismatchError, DataChangedError
from tessera.train.checkpoints.checkpoint_folder import (
    ROLLOUT,
    complete_steps,
    read_checkpoint,
)
from tests.train.loop.post_training_runs import (
    ONE,
    TWO_BY_TWO,
    lines_of,
    policy_run,
    train_policy,
    write_prompts,
)

GRPO = {"steps_per_rollout": 2, "passes": 2, "kl_coefficient": 0.1}
# What a clock says.
CLOCK = ("seconds", "tokens_per_second", "data_wait_fraction", "goodput")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    return write_prompts(tmp_path_factory.mktemp("prompts") / "sums.jsonl")


def sums_run(prompts, mesh=((1,), ("fsdp",)), grpo=None, **training):
    settings = {"steps": 7, "keep": None, "validate_every": 3, **training}
    return policy_run(prompts, mesh, {**GRPO, **(grpo or {})}, **settings)


def numbers(folder: Path, after: int = 0):
    return [
        {name: x for name, x in line.items() if not any(word in name for word in CLOCK)}
        for line in lines_of(folder / "metrics.jsonl")
        if line["step"] > after
    ]


def same_bits(left, right):
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.fixture(scope="module")
def whole(prompts, tmp_path_factory):
    """Seven steps of two rollouts, which were not stopped."""
    folder, run = tmp_path_factory.mktemp("whole"), sums_run(prompts)
    return run, train_policy(run, folder), folder


def again(run, **grpo):
    """A run that shares the compiled programs of another."""
    other = sums_run(run.config.data.path, grpo=grpo)
    if not grpo:
        names = "step", "compiled", "score_reference", "score_policy", "evaluate"
        vars(other).update({name: getattr(run, name) for name in names})
    return other


@pytest.mark.full
def test_the_run_learns_from_each_rollout_twice(whole):
    run, trainer, folder = whole
    lines = lines_of(folder / "metrics.jsonl")
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps if "reward" in line] == [1, 5]
    assert [line["step"] for line in lines if "val_reward" in line] == [3, 6, 7]
    first = steps[0]
    # The sampler and the trainer compute the same, and the first step is on policy.
    assert first["sampler_mismatch"] < 1e-5
    assert first["kl"] < 1e-6
    assert first["clip_low_fraction"] == first["clip_high_fraction"] == 0
    assert steps[-1]["kl"] > 1e-5
    assert {line["step"] for line in lines_of(folder / "samples.jsonl")} == {1, 5}
    # Its time is that of the steps, without the rollouts.
    slow = max(line["rollout_seconds"] for line in steps if "reward" in line)
    assert max(line["step_seconds"] for line in steps) < slow
    assert trainer.position.rollout.used == 3 * run.rows_per_step


@pytest.mark.full
@pytest.mark.parametrize("step", [1, 3, 4, 6])
def test_a_resumed_run_has_the_same_bits(whole, tmp_path, step):
    run, trainer, folder = whole
    resumed = train_policy(
        again(run), tmp_path, str(folder / "checkpoints" / str(step))
    )
    same_bits(resumed.position.state, trainer.position.state)
    assert numbers(tmp_path) == numbers(folder, after=step)
    samples = tmp_path / "samples.jsonl"
    assert samples.exists() == (step < 5)  # else nothing is left to sample
    if step < 5:
        assert {line["step"] for line in lines_of(samples)} == {5}


@pytest.mark.full
def test_another_mesh_goes_on_with_the_same_completions(whole, prompts, tmp_path):
    _, _, folder = whole
    run = sums_run(prompts, TWO_BY_TWO, steps=4, validate_every=None)
    train_policy(run, tmp_path, str(folder / "checkpoints" / "1"))
    losses = [line for line in numbers(folder) if "loss" in line][1:4]
    for here, alone in zip(numbers(tmp_path), losses, strict=False):
        for name in ("loss", "kl", "grad_norm", "entropy", "sampler_mismatch"):
            assert here[name] == pytest.approx(alone[name], rel=1e-4, abs=2e-6), name


@pytest.mark.full
def test_with_deterministic_numerics_another_mesh_goes_on_to_the_same_bits(
    prompts, tmp_path
):
    """Rollouts after the stop are sampled, scored and learned there, too."""
    fixed = {"numerics": "deterministic", "reduction_parts": 4, "steps": 6}
    grpo = {"steps_per_rollout": 2, "passes": 1}
    run = sums_run(prompts, TWO_BY_TWO, grpo, **fixed)
    trainer = train_policy(run, tmp_path / "whole")
    for mesh in (TWO_BY_TWO, ONE):
        folder = tmp_path / str(mesh[0])
        resumed = train_policy(
            sums_run(prompts, mesh, grpo, **fixed),
            *(folder, str(tmp_path / "whole/checkpoints/1")),
        )
        same_bits(resumed.position.state, trainer.position.state)
        rollouts = [one.position.rollout for one in (resumed, trainer)]
        same_bits(*(dict(sorted(one.arrays.items())) for one in rollouts))
        assert numbers(folder) == numbers(tmp_path / "whole", after=1)


@pytest.mark.full
def test_a_run_that_is_told_to_stop_makes_no_rollout(whole, tmp_path):
    run, trainer, folder = whole
    stopped = train_policy(again(run), tmp_path, should_continue=lambda at: at.step < 4)
    assert (stopped.is_stopped, stopped.step) == (True, 4)
    assert {line["step"] for line in lines_of(tmp_path / "samples.jsonl")} == {1}
    resumed = train_policy(again(run), tmp_path, "auto")
    same_bits(resumed.position.state, trainer.position.state)
    assert numbers(tmp_path) == numbers(folder)
    samples = [
        (one["step"], one["completion"]) for one in lines_of(tmp_path / "samples.jsonl")
    ]
    assert samples == [
        (one["step"], one["completion"]) for one in lines_of(folder / "samples.jsonl")
    ]


@pytest.mark.full
def test_other_settings_sample_anew_and_say_so(whole, tmp_path):
    run, _, folder = whole
    other = again(run, group_size=8)
    train_policy(other, tmp_path, str(folder / "checkpoints" / "6"))
    assert "none of them is learned" in (tmp_path / "train.log").read_text()
    (line,) = (one for one in numbers(tmp_path) if "loss" in one)
    assert "reward" in line


@pytest.mark.full
def test_a_damaged_rollout_is_a_damaged_checkpoint(whole, tmp_path):
    run, _, folder = whole
    train_policy(again(run), tmp_path, str(folder / "checkpoints" / "5"))
    file = tmp_path / "checkpoints" / "7" / ROLLOUT
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert isinstance(read_checkpoint(tmp_path / "checkpoints" / "7"), str)
    resumed = train_policy(again(run), tmp_path, "auto")
    assert resumed.step == 7
    assert complete_steps(tmp_path / "checkpoints") == [7, 6]
    names = sorted(entry.name for entry in (tmp_path / "checkpoints").iterdir())
    assert "7.damaged" in names


@pytest.mark.full
def test_other_prompts_or_another_objective_are_refused(whole, tmp_path):
    run, _, folder = whole
    path, checkpoint = (
        write_prompts(tmp_path / "more.jsonl", 50),
        folder / "checkpoints",
    )
    with pytest.raises(DataChangedError):
        train_policy(sums_run(path), tmp_path / "run", str(checkpoint / "3"))
    plain = sums_run(run.config.data.path, grpo={"kl_coefficient": 0.0})
    train_policy(plain, tmp_path / "plain", sampler=None)
    with pytest.raises(CheckpointMismatchError, match=r"training\.init_from"):
        train_policy(again(run), tmp_path / "run", str(tmp_path / "plain"))
