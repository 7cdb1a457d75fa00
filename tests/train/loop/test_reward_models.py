# SPDX-License-Identifier: Apache-2.0
"""A reward by a model is the score of its text's last token, on every mesh."""

import logging
from dataclasses import replace

import numpy as np
import pytest

from tessera.errors import ModelFolderError, TokenizerError, WeightFileError
from tessera.train.data.tokenization import load_tokenizer
from tessera.train.loop.reward_models import RewardModel
from tessera.train.models.classifier_folder import ClassifierFolder
from tessera.train.models.decoder.decoder_model import DecoderModel
from tessera.train.models.weights import import_weights
from tests.train.data.chat_folders import turns
from tests.train.loop.post_training_runs import (
    ONE,
    TWO_BY_TWO,
    policy_run,
    write_prompts,
)
from tests.train.models.classifier_folders import (
    CLASSIFIER,
    SCORE,
    write_classifier,
)

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
    assert found[0] == "does not read texts of any length (201 tokens, of 1 to 200)"
    assert found[1] == "does not read texts of any length (0 tokens, of 1 to 200)"
    assert found[2].startswith("cannot read a completion (the chat template does not")
    assert found[3] == pytest.approx(expected("ab"), abs=1e-6)
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
