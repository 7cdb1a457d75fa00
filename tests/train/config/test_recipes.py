# SPDX-License-Identifier: Apache-2.0
"""Recipes: which one a run has, and whose values win."""

import itertools
import re
import shutil
from functools import cache

import pytest
import yaml

from tessera.errors import TesseraError
from tessera.train.config.command_line import compose
from tessera.train.config.config_schema import settings_of_text
from tessera.train.config.optimizer_config import (
    OPTIMIZERS,
    AdafactorConfig,
    AdamWConfig,
    LionConfig,
    SgdConfig,
    unusual_rate,
)
from tessera.train.config.recipes import tunes_nothing
from tessera.train.config.setting_conflicts import EXCLUDED, UNREAD
from tessera.train.config.setting_fields import walk
from tests.train.config.command_lines import CONFIGS_DIR, composed

WEIGHTS = "training.init_from=weights.safetensors"
CHATS = ("data=text", "data.path=chats.jsonl", "data.messages_key=messages")
# Each optimizer in one recipe.
FAST = {
    *(("finetune", "adamw"), ("finetune", "sgd"), ("lora", "adam")),
    *(("pretrain", "lion"), ("pretrain", "adafactor")),
}


once = cache(composed)  # it takes a third of a second


def settings(*overrides):
    both = once(*overrides)
    # A checkpoint keeps what was chosen.
    assert settings_of_text(both.text) == both.config
    return both.config


def note(*overrides):
    (line,) = once(*overrides).notes
    return line


# --- which recipe a run has


@pytest.mark.slow(reason="it composes a dozen configurations")
def test_a_run_has_the_recipe_of_what_it_begins_with():
    assert settings().recipe == "none"
    assert settings(WEIGHTS).recipe == "finetune"
    assert settings(WEIGHTS, "model.lora.rank=4").recipe == "lora"
    assert settings(WEIGHTS, "model={lora: {rank: 4}}").recipe == "lora"
    assert settings(WEIGHTS, "recipe=lora").model.config.lora.rank == 16
    without = settings(WEIGHTS, "recipe=none")
    assert (without.recipe, without.optimizer) == ("none", AdamWConfig())


def test_the_log_says_which_recipe_and_why():
    assert note() == (
        "recipe=none, because the run begins with random weights; recipe=pretrain has "
        "values for larger models"
    )
    assert note(WEIGHTS, "training.sequence_length=64") == (
        "recipe=finetune, because the run begins with weights.safetensors; sets "
        "training.micro_batch_size=2 training.mixed_precision=bf16 "
        "training.sample_length=0 optimizer.learning_rate=1e-05 "
        "optimizer.warmup_steps=0.03"
    )
    assert note("model.lora.rank=4").startswith(
        "recipe=lora, because model.lora.rank is set; sets model.lora.alpha=32.0 "
    )
    assert note("recipe=pretrain").startswith("recipe=pretrain; sets training.")


def test_a_file_that_does_not_exist():
    with pytest.raises(TesseraError, match="did you mean 'finetune'") as error:
        composed("recipe=fine")
    assert error.value.code == "T502"
    for text in ("recipe=3", "recipe={training: {steps: 3}}"):
        with pytest.raises(TesseraError, match="recipe does not take this value"):
            composed(text)
    with pytest.raises(TesseraError, match=r"no setting 'recipe\.training"):
        composed("recipe=lora", "recipe.training.steps=3")


# --- whose values win


def test_the_command_line_wins_over_the_recipe_and_the_recipe_over_defaults():
    given = settings(
        "training={micro_batch_size: 1}",
        "recipe=lora",
        "model.lora.rank=64",
        "optimizer.learning_rate=3e-4",
    )
    assert (given.model.config.lora.rank, given.model.config.lora.alpha) == (64, 32)
    assert given.optimizer == AdamWConfig(learning_rate=3e-4, warmup_steps=0.03)
    assert given.training.micro_batch_size == 1
    assert given.training.sequence_length == 2048
    # The file of the defaults has no values of its own.
    assert settings("recipe=lora", "training=default") == settings("recipe=lora")


def test_a_default_that_is_written_wins():
    written = ("training.sequence_length=128", "optimizer.learning_rate=0.003")
    given = settings(WEIGHTS, *written)
    assert given.training.sequence_length == 128
    assert given.optimizer.learning_rate == 0.003


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        case if case in FAST else pytest.param(*case, marks=pytest.mark.full)
        for case in itertools.product(("finetune", "lora", "pretrain"), OPTIMIZERS)
    ],
)
def test_each_optimizer_has_a_rate_of_its_own(recipe, name):
    given = settings(f"recipe={recipe}", f"optimizer={name}").optimizer
    rates = yaml.safe_load((CONFIGS_DIR / f"recipe/{recipe}.yaml").read_text())
    rate = rates["optimizer"]["learning_rate"].get(name)
    # None is usual for SGD, nor for Adafactor but where T5 has one.
    assert given.learning_rate == (rate or OPTIMIZERS[name]().learning_rate)
    assert (rate is None) <= (name in ("sgd", "adafactor"))
    assert unusual_rate(given, 1, trains_all=recipe != "lora") is None or (
        recipe == "pretrain"
    )


@pytest.mark.parametrize("recipe", ["finetune", "lora", "pretrain"])
def test_no_value_of_a_recipe_excludes_what_a_user_writes(recipe):
    """A message would be about a setting that he has not written."""
    values = yaml.safe_load((CONFIGS_DIR / f"recipe/{recipe}.yaml").read_text())
    refused = " ".join(rule.settings for rule in (*EXCLUDED, *UNREAD))
    names = {*re.split(r"[\s=!|]+", refused)}
    assert not {path for path, _ in walk(values)} & names


@pytest.fixture
def configs(tmp_path):
    """The configuration files, to be changed."""
    return shutil.copytree(CONFIGS_DIR, tmp_path / "configs")


def test_a_file_of_ones_own_wins_over_the_recipe(configs):
    mine = "defaults: [default]\nsequence_length: 512\n"
    (configs / "training/mine.yaml").write_text(mine)
    rate = "defaults: [adamw, _self_]\nlearning_rate: 5e-6\n"
    (configs / "optimizer/mine.yaml").write_text(rate)
    given = compose([WEIGHTS, "training=mine", "optimizer=mine"], configs).config
    assert given.training.sequence_length == 512
    assert given.optimizer == AdamWConfig(learning_rate=5e-6, warmup_steps=0.03)
    assert given.training.mixed_precision == "bf16"


def test_recipes_of_ones_own(configs):
    mine = "defaults: [lora]\ntraining: {sequence_length: 512}\n"
    (configs / "recipe/mine.yaml").write_text(mine)
    given = compose(["recipe=mine"], configs).config
    assert (given.recipe, given.model.config.lora.rank) == ("mine", 16)
    assert given.training.sequence_length == 512
    (configs / "recipe/typo.yaml").write_text("training: {step: 3}\n")
    with pytest.raises(TesseraError, match=r"no setting 'training\.step'") as error:
        compose(["recipe=typo"], configs)
    assert error.value.got == "recipe=typo: training.step=3"


# --- what of conversations is learned


@pytest.mark.slow(reason="it composes a dozen configurations")
def test_the_answers_of_conversations_are_learned():
    assert settings(WEIGHTS, *CHATS).data.loss_on == "answers"
    assert note(WEIGHTS, *CHATS).endswith(" data.loss_on=answers")
    assert settings(*CHATS).data.loss_on == "all"
    assert settings(WEIGHTS, *CHATS, "data.loss_on=all").data.loss_on == "all"
    assert settings(WEIGHTS, *CHATS[:2]).data.loss_on == "all"


def test_the_answers_of_each_source_with_conversations_are_learned():
    sources = (
        "data.sources={chats: {path: a, messages_key: m}, books: {path: b}, "
        "more: {path: c, messages_key: m, loss_on: all}}"
    )
    given = settings(WEIGHTS, "data=mixture", sources).data.sources
    losses = {name: each.loss_on for name, each in given.items()}
    assert losses == {"chats": "answers", "books": "all", "more": "all"}
    assert "data.sources.chats.loss_on=answers" in note(
        WEIGHTS, "data=mixture", sources
    )


# --- runs that go on


@pytest.fixture
def folder(tmp_path):
    def made(*overrides, text=None):
        """The folder of a run with a checkpoint."""
        (tmp_path / "checkpoints" / "5").mkdir(parents=True, exist_ok=True)
        (tmp_path / "config.yaml").write_text(text or composed(*overrides).text)
        return tmp_path

    return made


@pytest.mark.slow(reason="it composes a dozen configurations")
def test_a_run_that_resumes_keeps_its_recipe(folder):
    run = folder("recipe=lora")
    own = f"hydra.run.dir={run}"
    for resume in (run, run / "checkpoints", run / "checkpoints/5"):
        given = settings(f"training.resume={resume}")
        assert (given.recipe, given.model.config.lora.rank) == ("lora", 16)
    assert note(f"training.resume={run}").startswith(
        f"recipe=lora, as the run in {run}"
    )
    # What it began with is said again, and is not what it goes on from.
    assert settings(WEIGHTS, "training.resume=auto", own).recipe == "lora"
    assert settings(f"training.resume={run}", "recipe=finetune").recipe == "finetune"


def test_a_run_from_before_there_were_recipes_keeps_its_values(folder):
    before = yaml.safe_load(composed("model.lora.rank=4", "recipe=none").text)
    del before["recipe"]
    run = folder(text=yaml.dump(before))
    given = settings(f"training.resume={run}", "model.lora.rank=4", *CHATS)
    assert (given.recipe, given.model.config.lora.alpha) == ("none", None)
    assert (given.optimizer, given.data.loss_on) == (AdamWConfig(), "all")


def test_a_run_that_has_no_checkpoint_begins_anew(folder):
    run = folder("recipe=lora")
    shutil.rmtree(run / "checkpoints")
    words = (WEIGHTS, "training.resume=auto", f"hydra.run.dir={run}")
    assert settings(*words).recipe == "finetune"


def test_a_recipe_that_is_gone(folder):
    run = folder(text=composed().text.replace("recipe: none", "recipe: ../mine"))
    with pytest.raises(TesseraError, match=r"there is no recipe '\.\./mine'"):
        composed(f"training.resume={run}")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["recipe=finetune"], True),
        (["model.lora.rank=4"], True),
        (["recipe=finetune", "training.resume=outputs/mine"], False),
        (["recipe=lora", "training.init_from=weights.safetensors"], False),
        (["recipe=pretrain"], False),
    ],
)
def test_fine_tuning_begins_with_weights(words, expected):
    assert tunes_nothing(composed("model=tiny", *words).config) is expected


def test_an_evaluation_lists_no_settings_of_an_optimizer(tmp_path):
    words = ("recipe=finetune", "model=tiny")
    assert "optimizer.learning_rate=" in composed(*words).notes[0]
    alone = f"training.resume={tmp_path}", "training.eval_only=true"
    note = composed(*words, *alone).notes[0]
    assert "training.mixed_precision=bf16" in note
    assert "optimizer." not in note


# --- learning rates that undo given weights


@pytest.mark.parametrize(
    ("config", "trains_all", "usual"),
    [
        (AdamWConfig(learning_rate=3e-3), True, "5e-06 to 5e-05"),
        (AdamWConfig(learning_rate=1e-4), True, None),
        (AdamWConfig(learning_rate=2e-3), False, None),
        (AdamWConfig(learning_rate=0.01), False, "5e-05 to 0.0005"),
        (LionConfig(learning_rate=1e-4), True, "1e-06 to 1e-05"),
        (LionConfig(learning_rate=2e-5), True, None),
        (SgdConfig(learning_rate=1.0), True, None),
        (AdafactorConfig(learning_rate=0.01), True, None),
    ],
)
def test_a_rate_far_above_the_usual_is_told(config, trains_all, usual):
    found = unusual_rate(config, 1, trains_all=trains_all)
    assert (found is None) if usual is None else (usual in found)


def test_the_rate_that_counts_is_scaled():
    config = AdamWConfig(learning_rate=5e-5, scale_learning_rate="linear")
    assert unusual_rate(config, 2, trains_all=True) is None
    assert unusual_rate(config, 8, trains_all=True).startswith(
        "a learning rate of 0.0004 likely undoes the weights"
    )
