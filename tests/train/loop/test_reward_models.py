# SPDX-License-Identifier: Apache-2.0
"""A reward by a model is the score of its text's last token, on every mesh."""

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tessera.errors import ModelFolderError, TokenizerError, WeightFileError
from tessera.train.data.cursor import Cursor
from tessera.train.data.tokenization import load_tokenizer
from tessera.train.loop.build_run import Run
from tessera.train.loop.position import Position
from tessera.train.loop.reward_models import RewardModel
from tessera.train.loop.rollout_batches import open_rollouts
from tessera.train.loop.train import run
from tessera.train.models.classifier_folder import ClassifierFolder
from tessera.train.models.decoder.decoder_model import DecoderModel
from tessera.train.models.weights import import_weights
from tests.train.config.command_lines import run_from_command_line
from tests.train.data.chat_folders import turns
from tests.train.loop.post_training_runs import (
    ONE,
    TWO_BY_TWO,
    ScriptedSampler,
    lines_of,
    policy_run,
    write_prompts,
)
from tests.train.models.classifier_folders import (
    CLASSIFIER,
    SCORE,
    write_classifier,
)
from tests.two_processes import found_by_two

# Of one to 63 tokens, in other orders than their lengths; and of more than 64.
TEXTS = ["hello", "", "he" * 30, "a<eos>", "\n", "all? " * 20, "é😀", "b", "hello all"]
PROMPTS = [f"{i} is " for i in range(len(TEXTS))]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_prompts(tmp_path_factory.mktemp("prompts") / "sums.jsonl")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_classifier(tmp_path_factory.mktemp("rewards") / "gemma")


@pytest.fixture(scope="module")
def expected(folder):
    """The score of a text by a decoder whose logit of word 0 it is."""
    opened, tokenizer = ClassifierFolder(folder), load_tokenizer(str(folder))
    params = import_weights(opened, DecoderModel(opened.config))
    params |= {"head": np.zeros_like(params["embedding"])}
    params["head"][0] = SCORE[0]
    model = DecoderModel(replace(opened.config, tied_head=False))

    def score(text):
        ids = tokenizer.encode_chat(text)[0]
        return float(model.apply(params, ids[None])[0, -1, 0])

    return score


@pytest.fixture(scope="module")
def on_one(data, folder):
    return RewardModel(policy_run(data), str(folder), reads_messages=True)


@pytest.fixture(scope="module")
def scores(on_one):
    return on_one(PROMPTS, TEXTS)


@pytest.mark.slow(reason="it compiles a program for each of two lengths")
def test_a_score_is_that_of_the_last_token_whatever_else_is_in_the_batch(
    scores, expected
):
    texts = [prompt + text for prompt, text in zip(PROMPTS, TEXTS, strict=True)]
    np.testing.assert_allclose(scores, [*map(expected, texts)], rtol=1e-5, atol=1e-6)
    assert len({round(score, 4) for score in scores}) == len(TEXTS)


def test_a_row_does_not_depend_on_its_neighbours(on_one, scores):
    pairs = zip(PROMPTS, TEXTS, strict=True)
    alone = [on_one([prompt], [text])[0] for prompt, text in pairs]
    np.testing.assert_array_equal(alone, scores)


def test_the_token_that_pads_is_scored_where_it_is_the_last(on_one, expected, caplog):
    texts = ["hello<eos>", "hello", "b<eos><eos>"]
    vars(on_one)["_padding"] = "<eos>"
    with caplog.at_level(logging.WARNING):
        found = on_one([""] * 3, texts)
    np.testing.assert_allclose(found, [*map(expected, texts)], rtol=1e-5, atol=1e-6)
    assert found[0] != pytest.approx(found[1], abs=1e-3)  # what Transformers scores
    (line,) = caplog.messages  # once for each model
    assert "scores the last token of a text, here <eos>: Transformers takes it" in line


def test_messages_go_through_the_chat_template_of_the_model_once(on_one, expected):
    prompts, answers = (
        [turns("hi"), turns("hi")],
        [turns("", " hello "), turns("", "b")],
    )
    found = on_one(prompts, [answer[1:] for answer in answers])
    begin = "<bos><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n"
    texts = [f"{begin}{text}<end_of_turn>\n" for text in ("hello", "b")]
    np.testing.assert_allclose(found, [*map(expected, texts)], rtol=1e-5, atol=1e-6)


def test_what_cannot_be_scored_is_missing_and_the_others_are_not(on_one, expected):
    long, roles = "x" * 201, turns("hi", "hello")[::-1]
    found = on_one(["", "", roles, "a"], [long, "", turns("hi"), "b"])
    assert found[:2] == ["reads at most 200 tokens (201)", "has no token to score"]
    assert found[2].startswith("cannot read a completion (the chat template does not")
    assert found[3] == pytest.approx(expected("ab"), rel=1e-5)
    assert isinstance(on_one([""], ["x" * 200])[0], float)


@pytest.mark.slow(reason="it compiles the programs of another mesh")
@pytest.mark.parametrize(
    "mesh", [TWO_BY_TWO, ((2, 2), ("fsdp", "cp")), ((2, 2), ("dp", "pp"))], ids=str
)
def test_scores_are_the_same_on_every_mesh(data, folder, scores, mesh):
    model = RewardModel(policy_run(data, mesh), str(folder), reads_messages=False)
    found = model(PROMPTS[:5], TEXTS[:5])
    np.testing.assert_allclose(found, scores[:5], rtol=1e-5, atol=1e-6)


@pytest.mark.slow(reason="it compiles the programs of two meshes")
def test_deterministic_numerics_give_the_same_bits_on_every_mesh(data, folder, scores):
    found = []
    for mesh, rows in ((ONE, 4), (TWO_BY_TWO, 2)):
        options = {"numerics": "deterministic", "reduction_parts": 4}
        run = policy_run(data, mesh, micro_batch_size=rows, **options)
        model = RewardModel(run, str(folder), reads_messages=False)
        found.append(model(PROMPTS[:5], TEXTS[:5]))
    assert found[0] == found[1]
    np.testing.assert_allclose(found[0], scores[:5], rtol=1e-5, atol=1e-6)


def test_parameters_are_in_the_dtype_of_computation_and_divided(data, folder):
    run = policy_run(data, TWO_BY_TWO, mixed_precision="bf16")
    model = RewardModel(run, str(folder), reads_messages=False)
    kernel = model._params["decoder"]["mlp"]["up"]["kernel"]
    assert kernel.dtype == "bfloat16"
    assert kernel.sharding.shard_shape(kernel.shape) == (2, 8, 16)


def test_a_score_that_is_no_number_is_missing(data, tmp_path):
    folder = write_classifier(tmp_path, tensors={"score.weight": SCORE * np.nan})
    model = RewardModel(policy_run(data), str(folder), reads_messages=False)
    assert model(["a"], ["b"]) == ["gave no number (nan)"]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ("values", ModelFolderError, "is no sequence classifier"),
        ("score", WeightFileError, "does not have the weights of one score"),
        ("tokenizer.json", TokenizerError, "has no tokenizer"),
        ("chat_template.jinja", TokenizerError, "has no chat template"),
        ("config.json", ModelFolderError, "cannot be read"),
    ],
)
def test_what_cannot_score_is_refused_before_it_is_loaded(
    data, tmp_path, change, error, message
):
    values = CLASSIFIER
    if change == "values":
        values = {**CLASSIFIER, "architectures": ["Gemma3ForCausalLM"]}
    tensors = {} if change == "score" else None
    folder = write_classifier(tmp_path, values, tensors)
    (folder / change).unlink(missing_ok=True)
    with pytest.raises(error, match=message):
        RewardModel(policy_run(data), str(folder), reads_messages=True)


# --- in runs


def test_a_rollout_has_the_rewards_of_its_model_beside_those_of_functions(
    data, folder, on_one, tmp_path
):
    begun, file = policy_run(data), tmp_path / "samples.jsonl"
    names = ["regex(pattern='1')", str(folder)]
    weighted = replace(begun.config.grpo, reward_weights=[10.0, 1.0])
    config = replace(begun.config, rewards=names, grpo=weighted)
    begun, corpus = Run(config, begun.mesh), begun.load_data()
    source = open_rollouts(begun, corpus, lambda phase, step: None, tmp_path, {})
    assert source is not None
    sampler = ScriptedSampler(
        lambda number, prompt: [48 + number, 65, 66][: number + 1]
    )
    vars(vars(source)["_writer"])["_sampler"] = sampler
    state: Any = SimpleNamespace(params=None, reference=None)
    position = Position(0, state, Cursor.start(corpus))
    with source:
        given = next(source.batches(lambda: position, lambda: None))
    lines = lines_of(file)
    expected = on_one(
        [one["prompt"] for one in lines], [one["completion"] for one in lines]
    )
    found = [one["rewards"]["gemma"] for one in lines]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert len({*found}) == len(lines) == 8
    totals = [one["reward"] - 10 * one["rewards"]["regex"] for one in lines]
    np.testing.assert_allclose(totals, found, rtol=1e-6, atol=1e-6)
    assert given.numbers["reward/gemma"] == pytest.approx(np.mean(found))
    assert [one["rewards"]["regex"] for one in lines] == [0, 1, *[0] * 6]


GRPO = (
    *("recipe=grpo", "model=tiny", "model.num_layers=2", "model.d_model=32"),
    *("data=prompts", "data.validation_fraction=0.1", "training.steps=3"),
    *("training.sequence_length=24", "training.report=false", "grpo.group_size=4"),
    *("training.global_batch_size=8", "grpo.max_completion=6", "optimizer=sgd"),
    *("training.numerics=deterministic", "training.reduction_parts=4"),
    *("training.mixed_precision=f32", "optimizer.learning_rate=0.5"),
)


@pytest.mark.full
def test_a_run_learns_from_a_model_alike_on_every_mesh(data, folder, tmp_path):
    curves = []
    for name, mesh, rows in (
        ("one", "[[1],[fsdp]]", 2),
        ("two", "[[2,2],[fsdp,tp]]", 2),
    ):
        words = (f"model.mesh_shape={mesh}", f"training.micro_batch_size={rows}")
        rewards = f"rewards=[exact,{folder}]", "grpo.reward_weights=[0.5,1.0]"
        place = f"data.path={data}", f"hydra.run.dir={tmp_path / name}"
        words = [*GRPO, *words, *rewards, *place]
        assert run_from_command_line(run, words) == 0
        lines = lines_of(tmp_path / name / "metrics.jsonl")
        steps = [line for line in lines if "reward/gemma" in line]
        curves.append([(one["reward/gemma"], one["loss"]) for one in steps])
    assert len(curves[0]) == 3
    assert curves[0] == curves[1]
    assert np.isfinite(curves[0]).all()


@pytest.mark.full
def test_a_dry_run_says_how_much_memory_a_model_takes(data, folder, tmp_path, capsys):
    words = f"data.path={data}", f"rewards=[{folder}]", "training.dry_run=true"
    mesh = "model.mesh_shape=[[2,2],[fsdp,tp]]", "training.micro_batch_size=2"
    assert run_from_command_line(run, [*GRPO, *words, *mesh]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "has 10,344 parameters, 10.6 KiB per device beside the state" in shown


PROGRAM = """
from tests.train.loop.post_training_runs import TWO_BY_TWO, policy_run
from tessera.train.loop.reward_models import RewardModel

run = policy_run({data!r}, TWO_BY_TWO)
model = RewardModel(run, {folder!r}, reads_messages=False)
print("FOUND", json.dumps(model({prompts!r}, {texts!r})))
"""


@pytest.mark.full
def test_two_processes_score_together_and_have_all_scores(data, folder, scores):
    given = {"prompts": PROMPTS[:5], "texts": [*TEXTS[:4], "x" * 300]}
    program = PROGRAM.format(data=str(data), folder=str(folder), **given)
    one, other = found_by_two(program)
    assert one == other
    np.testing.assert_allclose(one[:4], scores[:4], rtol=1e-5, atol=1e-6)
    assert one[4].startswith("reads at most 200 tokens")


@pytest.mark.slow(reason="it composes a run")
def test_a_dry_run_refuses_what_cannot_score(data, folder, tmp_path, capsys):
    values = {**CLASSIFIER, "architectures": ["Gemma3ForCausalLM"]}
    causal = write_classifier(tmp_path / "causal", values)
    words = f"data.path={data}", f"rewards=[{causal}]", "training.dry_run=true"
    assert run_from_command_line(run, [*GRPO, *words]) != 0
    assert "is no sequence classifier" in capsys.readouterr().err
