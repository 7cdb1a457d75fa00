# SPDX-License-Identifier: Apache-2.0
"""A folder is of a classifier with one score, or refused before it is used."""

import numpy as np
import pytest

from tessera.errors import ModelFolderError, WeightFileError
from tessera.train.models.classifier_folder import ClassifierFolder
from tessera.train.models.decoder.decoder_model import DecoderModel
from tessera.train.models.model_folder import ModelFolder
from tessera.train.models.weights import check_weights
from tests.train.models.classifier_folders import CLASSIFIER, SCORE, write_classifier
from tests.train.models.published_folders import gemma3_tensors, write_folder


def test_a_classifier_is_a_decoder_and_the_weights_of_a_score(tmp_path):
    folder = ClassifierFolder(write_classifier(tmp_path))
    check_weights(folder, DecoderModel(folder.config))
    np.testing.assert_array_equal(folder.score, SCORE[0])
    assert folder.score.dtype == np.float32


def test_a_decoder_whose_words_had_a_head_of_their_own_has_none(tmp_path):
    names = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads")
    names += ("num_hidden_layers", "head_dim", "intermediate_size", "rms_norm_eps")
    kind = {"architectures": ["Qwen3ForSequenceClassification"], "model_type": "qwen3"}
    values = {name: CLASSIFIER[name] for name in names} | kind
    tensors = gemma3_tensors(CLASSIFIER) | {"score.weight": SCORE}
    tensors = {n: t for n, t in tensors.items() if "_feedforward_" not in n}
    folder = ClassifierFolder(write_folder(tmp_path, tensors, values))
    check_weights(folder, DecoderModel(folder.config))
    assert not ModelFolder(tmp_path).config.tied_head


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"architectures": ["Gemma3ForCausalLM"]}, r"is no sequence classifier"),
        ({"architectures": ["Qwen2ForRewardModel"]}, r"is no sequence classifier"),
        ({"architectures": None}, r"is no sequence classifier"),
        ({"model_type": "bert"}, "of no family that Tessera knows"),
        ({"classifier_dropout": 0.1}, "this key is unknown"),
    ],
)
def test_another_kind_of_model_is_refused(tmp_path, values, message):
    folder = write_classifier(tmp_path, {**CLASSIFIER, **values})
    with pytest.raises(ModelFolderError, match=message):
        ClassifierFolder(folder)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, r"score\.weight: nothing\[\], not F32\[1, 16\]"),
        ({"score.weight": SCORE.repeat(3, 0)}, r"F32\[3, 16\], not F32\[1, 16\]"),
        ({"score.weight": SCORE[:, :8]}, r"F32\[1, 8\], not F32\[1, 16\]"),
        ({"score.weight": SCORE.astype(np.int32)}, r"I32\[1, 16\], not F32\[1, 16\]"),
        (
            {"score.weight": SCORE, "score.bias": SCORE[0, :1]},
            r"score\.bias: the folder has F32\[1\], the model nothing",
        ),
        (
            {"score.0.weight": SCORE, "score.2.weight": SCORE},
            r"score\.0\.weight: the folder has",
        ),
    ],
)
def test_anything_but_one_score_is_refused(tmp_path, tensors, message):
    folder = ClassifierFolder(write_classifier(tmp_path, tensors=tensors))
    with pytest.raises(WeightFileError, match=message):
        check_weights(folder, DecoderModel(folder.config)), folder.score
