# SPDX-License-Identifier: Apache-2.0
"""Tokenizers: there and back, and every way in which they cannot be had."""

import json
import re
import shutil
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.errors import TokenizerError
from tessera.train.data.tokenization import ByteTokenizer, load_tokenizer

TEXTS = ["def f(x):\n    return x + 1\n", "for i in range(10):\n    print(i)\n"] * 20


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


@pytest.mark.full
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


def test_ids_that_stand_for_no_text_are_left_out(json_file):
    tokenizer = load_tokenizer(str(json_file))
    ids = tokenizer.encode("return").tolist()
    beyond = [tokenizer.separator, -1, tokenizer.vocab_size, 10**6]
    assert tokenizer.decode(ids + beyond) == "return"


def test_text_tokenizers_refuse_what_is_not_utf_8(json_file):
    tokenizer = load_tokenizer(str(json_file))
    with pytest.raises(UnicodeDecodeError):
        tokenizer.encode(b"caf\xe9")


def test_an_unknown_name_lists_what_there_is():
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer("byte")
    assert str(caught.value) == (
        "[T605] there is no tokenizer 'byte'\n"
        "  got: data.tokenizer=byte\n"
        "  fix: did you mean 'bytes'? Known: 'bytes', the path of a tokenizers file "
        "(.json) or of a folder with one; Hugging Face Transformers makes one of a "
        "sentencepiece model: AutoTokenizer.from_pretrained(…).save_pretrained(…)\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T605.html"
    )


def test_a_missing_file_is_not_downloaded(tmp_path):
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(f"{tmp_path}/gemma.json")
    assert str(caught.value) == (
        f"[T605] the tokenizer file '{tmp_path}/gemma.json' does not exist\n"
        f"  got: no file at {tmp_path}/gemma.json\n"
        "  fix: set data.tokenizer to a file on this machine, to a model of the Hub "
        "(hf://<organization>/<name>), or to bytes\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T605.html"
    )


def test_a_missing_library_names_the_extra(tmp_path, monkeypatch):
    library, path = "tokenizers", tmp_path / "t.json"
    path.touch()
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(str(path))
    assert str(caught.value) == (
        f"[T605] reading 't.json' needs the library '{library}'\n"
        f"  got: import of {library} halted; None in sys.modules\n"
        "  fix: run: pip install 'tessera-spmd[tokenizers]'\n"
        "  fix: or use data.tokenizer=bytes, which needs nothing\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T605.html"
    )


@pytest.mark.parametrize("content", [b"", b"junk", b'{"version": "1.0"}'])
def test_a_broken_file_names_it_and_its_library(tmp_path, capfd, content):
    library, path = "tokenizers", tmp_path / "t.json"
    path.write_bytes(content)
    what = re.escape(f"[T605] the library '{library}' cannot read '{path}'\n  got: ")
    with pytest.raises(TokenizerError, match=f"^{what}[^\n]+\n  fix: use a .json"):
        load_tokenizer(str(path))
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def folder(json_file, tmp_path):
    shutil.copy(json_file, tmp_path / "tokenizer.json")
    return tmp_path


def write_config(folder, **values):
    (folder / "tokenizer_config.json").write_text(json.dumps(values))


@pytest.mark.parametrize("path", ["", "tokenizer.json"])
def test_the_separator_is_the_one_that_the_folder_names(folder, path):
    assert load_tokenizer(f"{folder}/{path}").separator == 1  # <bos>, by its name
    write_config(folder, bos_token=None, eos_token="<pad>")
    assert load_tokenizer(f"{folder}/{path}").separator == 0
    write_config(folder, bos_token={"content": "<bos>"}, eos_token="<pad>")
    assert load_tokenizer(f"{folder}/{path}").separator == 1


def test_a_sentencepiece_model_is_refused(tmp_path):
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(TokenizerError, match="makes one of a sentencepiece model"):
        load_tokenizer(f"{tmp_path}/tokenizer.model")


def test_tokens_that_were_added_later_are_added(folder):
    size = load_tokenizer(str(folder)).vocab_size
    added = {str(size): {"content": "<turn>", "special": True}}
    write_config(folder, added_tokens_decoder=added, bos_token="<turn>")
    tokenizer = load_tokenizer(str(folder))
    assert (tokenizer.vocab_size, tokenizer.separator) == (size + 1, size)
    assert size not in tokenizer.encode("a<turn>")
    assert tokenizer.encode_chat("a<turn>")[0][-1] == size
    added = {str(size + 5): {"content": "<turn>", "special": True}}
    write_config(folder, added_tokens_decoder=added)
    with pytest.raises(TokenizerError, match=f"is id {size + 5}\n.*it is id {size}\n"):
        load_tokenizer(str(folder))


@pytest.mark.parametrize(
    ("content", "got"),
    [
        (b"{", "Expecting property name"),
        (b"[]", "has no attribute"),
        (b'{"bos_token": 1}', "1 is not the name of a token"),
        (b'{"bos_token": "<none>"}', "'<none>', which tokenizer.json does not have"),
        (b'{"chat_template": 1}', "chat_template is not text"),
        (b'{"added_tokens_decoder": {"a": {}}}', "invalid literal"),
    ],
)
def test_settings_that_cannot_be_read_are_named(folder, content, got):
    (folder / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(TokenizerError, match=re.escape(got)):
        load_tokenizer(str(folder))


def test_a_template_is_in_its_own_file_or_in_the_settings(folder):
    write_config(folder, chat_template="one")
    assert load_tokenizer(str(folder)).folder.chat_template == "one"
    named = [{"name": "tool", "template": "x"}, {"name": "default", "template": "two"}]
    write_config(folder, chat_template=named)
    assert load_tokenizer(str(folder)).folder.chat_template == "two"
    (folder / "chat_template.jinja").write_text("three")
    assert load_tokenizer(str(folder)).folder.chat_template == "three"


def test_a_folder_without_a_tokenizer_says_what_it_lacks(tmp_path):
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(str(tmp_path))
    assert str(caught.value) == (
        f"[T605] the folder '{tmp_path}' has no tokenizer\n"
        "  got: no tokenizer.json\n"
        "  fix: save the tokenizer there with Hugging Face Transformers' "
        "save_pretrained, or choose another one: data.tokenizer=<file or folder>, "
        "or bytes\n"
        "  fix: or, for tessera generate, name the run that was exported\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T605.html"
    )


class PanicException(BaseException):
    """What Rust's panics become; no ``Exception``."""


def panic(*arguments: object, **more: object) -> None:
    raise PanicException("index out of bounds")


def test_a_panic_of_the_library_is_a_coded_error(json_file, monkeypatch):
    tokenizer = load_tokenizer(str(json_file))
    tokenizer._tokenizer = type("Tokenizer", (), {"encode_batch_fast": panic})()
    with pytest.raises(TokenizerError, match="has no ids for this text"):
        tokenizer.encode("a")
    kind = type("Tokenizer", (), {"from_buffer": panic})
    library = type("tokenizers", (), {"Tokenizer": kind})
    monkeypatch.setitem(sys.modules, "tokenizers", library)
    with pytest.raises(TokenizerError, match="index out of bounds"):
        load_tokenizer(str(json_file))


@pytest.mark.parametrize(
    "settings",
    [
        "[]",
        "5",
        "[" * 5000,
        '{"bos_token": {}}',
        '{"bos_token": 5}',
        '{"added_tokens_decoder": [1]}',
        '{"added_tokens_decoder": {"x": {}}}',
        '{"added_tokens_decoder": {"5": {}}}',
        '{"added_tokens_decoder": {"5": {"content": 5}}}',
        '{"added_tokens_decoder": {"5": {"content": "a", "special": null}}}',
        '{"added_tokens_decoder": {"99999999999": {"content": "\\ud800"}}}',
        '{"chat_template": {"a": 1}}',
        '{"chat_template": [1]}',
    ],
)
def test_odd_settings_of_a_tokenizer_are_refused(json_file, settings, tmp_path):
    shutil.copy(json_file, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(settings)
    with pytest.raises(TokenizerError, match="T605"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_of_more_than_64_mib_is_not_read(tmp_path):
    name = "tokenizer.json"
    with (tmp_path / name).open("wb") as file:
        file.truncate(2**26 + 1)
    with pytest.raises(TokenizerError, match="it has more than 67,108,864 bytes"):
        load_tokenizer(str(tmp_path / name))
