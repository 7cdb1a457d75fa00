# SPDX-License-Identifier: Apache-2.0
"""The settings of preference and reward tuning, before anything is read."""

import pytest

from tessera.errors import TesseraError
from tessera.train.config.post_training_config import ALGORITHMS, GrpoConfig
from tessera.train.config.recipes import tunes_nothing
from tessera.train.objectives import policy_losses
from tests.train.config.command_lines import composed

PAIRS = ("recipe=preference", "data=preferences", "data.path=pairs.jsonl")
PROMPTS = ("recipe=grpo", "data=prompts", "data.path=prompts.jsonl")
REWARDED = (*PROMPTS, "rewards=[exact]")


def error_of(*words: str) -> TesseraError:
    with pytest.raises(TesseraError) as caught:
        composed(*words)
    return caught.value


def test_the_algorithms_are_those_that_there_are():
    assert set(ALGORITHMS) == set(policy_losses.ALGORITHMS)


def test_a_recipe_for_given_weights_warns_of_random_ones():
    assert all(tunes_nothing(composed(*words).config) for words in (PAIRS, REWARDED))


def test_recipes_choose_the_objective():
    assert composed(*PAIRS).config.training.objective == "preference"
    assert composed(*REWARDED).config.training.objective == "policy"


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (("recipe=preference", "data=stdlib"), "data=preferences"),
        (("recipe=grpo", "rewards=[exact]"), "data=prompts"),
        (("data=preferences", "data.path=pairs.jsonl"), "recipe=preference"),
        (("data=prompts", "data.path=prompts.jsonl"), "recipe=grpo"),
        (PROMPTS, "rewards=[my_module:my_function]"),
    ],
)
def test_an_objective_has_data_and_rewards_of_its_own(words, fix):
    error = error_of(*words)
    assert error.code == "T507"
    assert fix in error.fix


@pytest.mark.parametrize(
    "words",
    [
        ("preference.beta=0.5",),
        ("grpo.group_size=4",),
        ("rewards=[exact]",),
        (*PAIRS, "grpo.group_size=4"),
        (*PAIRS, "preference.margin=1"),
        (*PAIRS, "preference.loss=simpo", "preference.reference=copy"),
        (*REWARDED, "preference.beta=0.5"),
        (*REWARDED, "grpo.kl_estimator=k1"),
        (*REWARDED, "training.eval_only=true"),
        (*PROMPTS, "grpo.environment=my:Game", "grpo.reward_weights=[2.0]"),
        (*PROMPTS, "rewards=[./rm]", "grpo.reward_time_limit=9"),
    ],
)
def test_a_setting_that_nothing_reads_is_refused(words):
    assert error_of(*words).code == "T507"


def test_a_function_beside_a_model_has_a_time_limit():
    assert composed(*PROMPTS, "rewards=[./rm,exact]", "grpo.reward_time_limit=9")


def test_groups_fill_the_steps_of_a_rollout():
    few = ("training.global_batch_size=12", "training.micro_batch_size=4")
    error = error_of(*REWARDED, *few)
    assert error.code == "T503"
    assert "12 sequences x 1 steps = 12 completions in groups of 8" in error.got
    assert composed(*REWARDED, *few, "grpo.steps_per_rollout=2")


def test_prompts_have_room_beside_completions():
    error = error_of(*REWARDED, "grpo.max_completion=2000")
    assert error.code == "T503"
    assert "leave no room" in error.what


def test_steps_of_a_rollout_are_those_of_all_passes():
    assert GrpoConfig(steps_per_rollout=3, passes=2).steps_of_a_rollout == 6


@pytest.mark.parametrize("shape", ["[[3],[tp]]", "[4]", "[[4],[pp]]", "[[4],[xy]]"])
def test_the_sampler_has_a_mesh_of_the_same_devices(shape):
    mesh = "model.mesh_shape=[[4,1],[fsdp,tp]]"
    assert error_of(*REWARDED, mesh, f"grpo.mesh_shape={shape}").code == "T101"
    assert composed(*REWARDED, mesh, "grpo.mesh_shape=[[1,4],[fsdp,tp]]")
