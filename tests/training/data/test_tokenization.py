# SPDX-License-Identifier: Apache-2.0
"""Tokenizers: there and back, and every way in which they cannot be had."""

import re
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.errors import TokenizerError
from tessera.training.data.tokenization import ByteTokenizer, load_tokenizer
from tests.training.data.conftest import TEXTS


@pytest.fixture(scope="module")
def json_file(tmp_path_factory):
    """A byte-level BPE that asks for truncation and padding."""
    library = pytest.importorskip("tokenizers")
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<bos>"],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=500)
    path = tmp_path_factory.mktemp("json") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@given(st.binary())
def test_bytes_are_their_own_ids(content):
    ids = ByteTokenizer().encode(content)
    assert ids.dtype == np.int32
    assert ids.tolist() == list(content)


@given(st.text())
def test_text_comes_back_from_bytes(text):
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([256, *tokenizer.encode(text), 256, 270, -1]) == text


def test_a_broken_character_does_not_stop_decoding():
    assert ByteTokenizer().decode([0xC3, 0x28]) == "\ufffd("


def test_a_json_file_loses_no_text_to_truncation_or_padding(json_file):
    tokenizer = load_tokenizer(str(json_file))
    text = TEXTS[0] * 50
    ids = tokenizer.encode(text.encode())
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode("x").size == 1
    assert (tokenizer.kind, tokenizer.separator) == ("tokenizers", 1)
    assert 258 <= tokenizer.vocab_size <= 300


def test_a_special_token_s_name_in_a_text_is_only_text(json_file):
    tokenizer = load_tokenizer(str(json_file))
    ids = tokenizer.encode("a<bos>b")
    assert tokenizer.separator not in ids
    assert tokenizer.decode(ids) == "a<bos>b"


def test_a_sentencepiece_model_gives_its_ids_and_text(model_file):
    tokenizer = load_tokenizer(str(model_file))
    ids = tokenizer.encode(b"return x + 1")
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == "return x + 1"
    assert (tokenizer.kind, tokenizer.separator) == ("sentencepiece", 1)
    assert ids.max() < tokenizer.vocab_size


@pytest.mark.parametrize("kind", ["json_file", "model_file"])
def test_ids_that_stand_for_no_text_are_left_out(kind, request):
    tokenizer = load_tokenizer(str(request.getfixturevalue(kind)))
    ids = tokenizer.encode("return").tolist()
    beyond = [tokenizer.separator, -1, tokenizer.vocab_size, 10**6]
    assert tokenizer.decode(ids + beyond) == "return"


@pytest.mark.parametrize("kind", ["json_file", "model_file"])
def test_text_tokenizers_refuse_what_is_not_utf_8(kind, request):
    tokenizer = load_tokenizer(str(request.getfixturevalue(kind)))
    with pytest.raises(UnicodeDecodeError):
        tokenizer.encode(b"caf\xe9")


def test_an_unknown_name_lists_what_there_is():
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer("byte")
    assert str(caught.value) == (
        "[T605] there is no tokenizer 'byte'\n"
        "  got: data.tokenizer=byte\n"
        "  fix: did you mean 'bytes'? Known: 'bytes', the path of a tokenizers file "
        "(.json) or of a sentencepiece model (.model)\n"
        "  docs: docs/errors/T605.md"
    )


def test_a_missing_file_is_not_downloaded(tmp_path):
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(f"{tmp_path}/gemma.model")
    assert str(caught.value) == (
        f"[T605] the tokenizer file '{tmp_path}/gemma.model' does not exist\n"
        f"  got: no file at {tmp_path}/gemma.model\n"
        "  fix: set data.tokenizer to a file on this machine, or use bytes; nothing is "
        "downloaded\n"
        "  docs: docs/errors/T605.md"
    )


@pytest.mark.parametrize(
    ("suffix", "library"), [(".json", "tokenizers"), (".model", "sentencepiece")]
)
def test_a_missing_library_names_the_extra(tmp_path, monkeypatch, suffix, library):
    path = tmp_path / f"t{suffix}"
    path.touch()
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(str(path))
    assert str(caught.value) == (
        f"[T605] reading 't{suffix}' needs the library '{library}'\n"
        f"  got: import of {library} halted; None in sys.modules\n"
        "  fix: run: pip install 'tessera[tokenizers]'\n"
        "  fix: or use data.tokenizer=bytes, which needs nothing\n"
        "  docs: docs/errors/T605.md"
    )


@pytest.mark.parametrize("content", [b"", b"junk", b'{"version": "1.0"}'])
@pytest.mark.parametrize(
    ("suffix", "library"), [(".json", "tokenizers"), (".model", "sentencepiece")]
)
def test_a_broken_file_names_it_and_its_library(
    tmp_path, capfd, suffix, library, content
):
    path = tmp_path / f"t{suffix}"
    path.write_bytes(content)
    what = re.escape(f"[T605] the library '{library}' cannot read '{path}'\n  got: ")
    with pytest.raises(TokenizerError, match=f"^{what}[^\n]+\n  fix: use a .json"):
        load_tokenizer(str(path))
    assert capfd.readouterr() == ("", "")
