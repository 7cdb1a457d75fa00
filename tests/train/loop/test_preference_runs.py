# SPDX-License-Identifier: Apache-2.0
"""Runs of ``recipe=preference``: they resume, and keep what they compare with."""

import json

import numpy as np
import pytest

from tessera.errors import CheckpointMismatchError
from tessera.train.checkpoints.choose_checkpoint import choose
from tessera.train.commands.export import main as export
from tessera.train.config.mesh_shape import mesh_of_shape
from tessera.train.loop.build_run import Run
from tessera.train.loop.main import main
from tests.train.config.command_lines import composed
from tests.train.loop.post_training_runs import write_pairs

SMALL = (
    *("model.vocab_size=264", "model.d_model=16", "model.num_layers=2"),
    *("model.num_heads=2", "model.num_kv_heads=2", "model.head_dim=8"),
    *("model.mlp_dim=16", "model.window=8", "training.sequence_length=16"),
    *("training.global_batch_size=8", "training.micro_batch_size=4"),
    *("training.report=false", "training.sample_length=0", "training.steps=4"),
    *("training.mixed_precision=f32", "data.tokenizer=bytes"),
    *("optimizer.learning_rate=0.05", "optimizer.warmup_steps=0"),
    *("training.checkpoint_every=2", "training.validate_every=2"),
)
BEGIN = "training.init_from=weights.safetensors"
MEASURED = ("loss", "chosen_reward", "rejected_reward", "reward_margin", "accuracy")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    file = write_pairs(tmp_path_factory.mktemp("pairs") / "pairs.jsonl")
    return *SMALL, "recipe=preference", "data=preferences", f"data.path={file}"


def lines(folder):
    text = (folder / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def measured(folder, after=0):
    """What each step and each validation says of its pairs."""
    prefixes = "", "val_"
    return [
        {p + n: line[p + n] for p in prefixes for n in MEASURED if p + n in line}
        for line in lines(folder)
        if line["step"] > after
    ]


@pytest.fixture(scope="module")
def tuned(pairs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuned") / "run"
    assert main([*pairs, f"hydra.run.dir={folder}"]) == 0
    return folder


@pytest.mark.full
def test_the_first_step_compares_equals_and_the_last_has_learned(tuned):
    first, *_, last = measured(tuned)
    assert first["loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert first["chosen_reward"] == first["rejected_reward"] == 0
    assert last["val_loss"] < first["loss"]
    for line in measured(tuned):
        for prefix in {"", "val_"} & {name[:4] * (name[:4] == "val_") for name in line}:
            parts = (line[f"{prefix}{side}_reward"] for side in ("chosen", "rejected"))
            margin = np.subtract(*parts)
            assert line[f"{prefix}reward_margin"] == pytest.approx(margin, abs=1e-6)


@pytest.mark.full
@pytest.mark.parametrize(
    ("settings", "exact"),
    [
        ([], True),
        (["model.mesh_shape=[[2,2],[fsdp,tp]]", "training.micro_batch_size=2"], False),
        (
            [
                "model.mesh_shape=[[2,2],[dp,fsdp]]",
                "training.micro_batch_size=1",
                "training.zero_stage=2",
                "training.on_spike=warn",
            ],
            False,
        ),
        (["training.mixed_precision=fp16", "training.on_spike=skip"], None),
    ],
    ids=["alone", "mesh", "zero", "fp16"],
)
def test_a_resumed_run_compares_with_what_the_run_began_with(
    pairs, tuned, tmp_path, settings, exact
):
    start = f"training.resume={tuned}/checkpoints/2", f"hydra.run.dir={tmp_path}/run"
    assert main([*pairs, *settings, *start]) == 0
    expected, found = measured(tuned, after=2), measured(tmp_path / "run")
    if exact is None:  # the gradients overflow at the loss scale to begin with
        expected, found = expected[:1], found[:1]
    tolerance = {True: 0, False: 1e-4, None: 1e-3}[exact]
    for here, there in zip(found, expected, strict=True):
        assert here == pytest.approx(there, rel=tolerance, abs=tolerance / 10)


@pytest.mark.full
def test_an_export_has_the_policy_and_a_new_run_compares_with_it(
    pairs, tuned, tmp_path
):
    file = tmp_path / "policy.safetensors"
    assert export([str(tuned), str(file)]) == 0
    assert not [name for name in read_names(file) if "reference" in name]
    again = [*pairs, "training.steps=1", f"training.init_from={file}"]
    assert main([*again, f"hydra.run.dir={tmp_path}/run"]) == 0
    before, step, _ = measured(tmp_path / "run", after=-1)
    # Nothing is learned yet: the policy is its own reference.
    assert before["val_reward_margin"] == step["reward_margin"] == 0
    assert measured(tuned)[-1]["val_reward_margin"] > 0


def read_names(file):
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size])


def refused(command, resume, folder):
    """What is said of a checkpoint that a run cannot resume."""
    config = composed(*command).config
    run = Run(config, mesh_of_shape(config.model.mesh_shape))
    with pytest.raises(CheckpointMismatchError) as error:
        choose(str(resume), folder).check(run, run.load_data(), "")
    return str(error.value)


@pytest.mark.full
def test_a_checkpoint_without_a_reference_is_begun_with_and_not_resumed(
    pairs, tuned, tmp_path
):
    # The loss does without one: what the checkpoint has of it is dropped.
    folder = tmp_path / "orpo"
    odds = [*pairs, "preference.loss=orpo", "training.steps=6"]
    assert main([*odds, f"training.resume={tuned}", f"hydra.run.dir={folder}"]) == 0
    log = (folder / "train.log").read_text()
    assert "does not use the checkpoint's reference: it is dropped" in log
    assert BEGIN in refused([*pairs, "training.steps=7"], folder, tmp_path / "other")
    plain = [*SMALL, "data=synthetic", "training.steps=1", "recipe=none"]
    plain.remove("data.tokenizer=bytes")
    assert main([*plain, f"hydra.run.dir={tmp_path}/plain"]) == 0
    error = refused(pairs, tmp_path / "plain", tmp_path / "other")
    assert "training.objective: saved next_token, this run preference" in error
    assert BEGIN in error


@pytest.mark.full
def test_nothing_is_compiled_once_steps_are_taken(tuned):
    assert "compiles again" not in (tuned / "train.log").read_text()
