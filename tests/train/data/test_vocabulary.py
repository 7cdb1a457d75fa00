# SPDX-License-Identifier: Apache-2.0
"""Tokenizers with more ids than the model has rows, as those of Gemma 3 have."""

import json

import pytest

from tessera.errors import TokenRangeError, VocabularyError
from tessera.train.data import DataConfig, load

TEXT = "Call me Ishmael .\nSome years ago .\n"


@pytest.fixture
def tokenizer_file(tmp_path):
    """Words with ids from 1 on, ``<bos>`` 0, and one id that is in no text: 7."""
    pytest.importorskip("tokenizers")
    words = ["<bos>", *dict.fromkeys(TEXT.split()), "<image_soft_token>"]
    vocabulary = {word: number for number, word in enumerate(words)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<bos>"}
    made = {"version": "1.0", "pre_tokenizer": {"type": "WhitespaceSplit"}}
    path = tmp_path / "words.json"
    path.write_text(json.dumps(made | {"model": model}))
    return path


def corpus(tmp_path, tokenizer_file, text, vocab_size):
    (tmp_path / "a.txt").write_text(text)
    config = DataConfig(
        name="text",
        path=str(tmp_path / "a.txt"),
        tokenizer=str(tokenizer_file),
        validation_fraction=0,
    )
    return load(config, sequence_length=4, seed=0, vocab_size=vocab_size)


@pytest.mark.full
def test_an_id_beyond_the_model_s_that_is_in_no_text_is_a_note(
    tmp_path, tokenizer_file
):
    made = corpus(tmp_path, tokenizer_file, TEXT, vocab_size=8)
    assert made.tokenizer.vocab_size == 9
    assert (
        "tokenizer   tokenizers, 9 ids, 1 of them not in the model's vocabulary, "
        "separator 0\n"
    ) in made.describe()
    assert "of them" not in corpus(tmp_path, tokenizer_file, TEXT, 9).describe()


def test_a_text_that_has_such_an_id_is_told_where(tmp_path, tokenizer_file):
    text = TEXT + "Some <image_soft_token> <image_soft_token>\n"
    with pytest.raises(TokenRangeError) as caught:
        corpus(tmp_path, tokenizer_file, text, vocab_size=8)
    assert str(caught.value) == (
        "[T604] the text of 'a.txt' has a token that the model does not have\n"
        "  got: '<image_soft_token>', id 8, is token 10 of 11, at line 3; 2 such in "
        "all; the model has ids 0 to 7\n"
        "  fix: remove it from the text, or use the model's own tokenizer; a model "
        "that is trained from scratch can have a larger model.vocab_size\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T604.html"
    )
    assert corpus(tmp_path, tokenizer_file, text, vocab_size=9)


def test_the_line_is_that_of_the_file_also_after_the_cut(tmp_path, tokenizer_file):
    (tmp_path / "a.txt").write_text(TEXT * 10 + "<image_soft_token>\n")
    config = DataConfig(
        name="text", path=str(tmp_path / "a.txt"), tokenizer=str(tokenizer_file)
    )
    with pytest.raises(TokenRangeError, match=r"is token \d+ of \d+, at line 21; "):
        load(config, sequence_length=4, seed=0, vocab_size=8)


def test_a_separator_that_the_model_does_not_have_is_in_every_text(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    config = DataConfig(name="text", path=str(tmp_path / "a.txt"))
    with pytest.raises(VocabularyError, match="id 256 precedes every document"):
        load(config, sequence_length=4, seed=0, vocab_size=256)
