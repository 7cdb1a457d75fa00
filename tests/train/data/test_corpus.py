# SPDX-License-Identifier: Apache-2.0
"""From settings to batches, and everything that can be wrong before the first."""

import re
from itertools import islice

import numpy as np
import pytest

from tessera.errors import EmptyDataError, SettingValueError, VocabularyError
from tessera.train.data import DataConfig, SyntheticConfig, load
from tessera.train.data.file_ranges import split
from tessera.train.data.files import list_files
from tessera.train.data.packing import PackedRows


def corpus(path="", *, sequence_length=8, seed=0, vocab_size=257, **settings):
    name = "text" if path else settings.pop("name", "stdlib")
    config = DataConfig(name=name, path=str(path), **settings)
    return load(
        config, sequence_length=sequence_length, seed=seed, vocab_size=vocab_size
    )


def sides_of(made) -> tuple[PackedRows, PackedRows]:
    (source,) = made.sources
    return source.train_rows, source.validation_rows


def text_of(made, side: int) -> str:
    return made.tokenizer.decode(sides_of(made)[side].stream.read(0, 10**9).tokens)


@pytest.fixture
def folder(tmp_path):
    for i in range(40):
        (tmp_path / f"{i}.txt").write_text(f"document number {i}\n" * 3)
    return tmp_path


def refusal(error, **arguments) -> str:
    with pytest.raises(error) as caught:
        corpus(**arguments)
    return str(caught.value)


def test_the_default_corpus_is_python_s_own_source():
    standard = corpus(sequence_length=128)
    (source,) = standard.sources
    assert len(source.train_rows) > 20_000
    assert 0.01 < len(source.validation_rows) / len(source.train_rows) < 0.1
    text = standard.tokenizer.decode(source.train_rows.stream.read(0, 400_000).tokens)
    assert "def __init__(self" in text
    assert re.fullmatch(
        r"data        standard library of Python 3\.\d+\.\d+\n"
        r"tokenizer   bytes, 257 ids, separator 256\n"
        r"train       \d+ documents, [\d,]+ bytes, [\d,]+ tokens, [\d,]+ rows of 128\n"
        r"validation  \d+ documents, [\d,]+ bytes, [\d,]+ tokens, [\d,]+ rows of 128\n"
        r"fingerprint [0-9a-f]{16}",
        standard.describe(),
    )


def test_every_byte_of_every_file_is_read_once(folder):
    made = corpus(folder, validation_fraction=0.2)
    streams = [rows.stream for rows in sides_of(made)]
    texts = [
        made.tokenizer.decode(part).encode()
        for tokens, starts, _ in (stream.read(0, 10**9) for stream in streams)
        for part in np.split(tokens, starts[1:])
    ]
    assert sorted(texts) == sorted(path.read_bytes() for path in folder.iterdir())
    assert sum(stream.num_bytes for stream in streams) == sum(map(len, texts))
    assert streams[1].num_documents > 1


def test_one_seed_gives_the_same_batches_and_another_gives_others(folder):
    def take(seed):
        return [b["tokens"] for b in islice(corpus(folder, seed=seed).train(4), 30)]

    np.testing.assert_array_equal(take(0), take(0))
    assert not np.array_equal(take(0), take(1))


def test_validation_does_not_depend_on_the_seed(folder):
    first, second = (list(corpus(folder, seed=s).validation(4)) for s in (0, 1))
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one["tokens"], other["tokens"])


def test_targets_follow_tokens_through_the_whole_row(folder):
    batch = next(corpus(folder).train(4))
    assert {values.dtype for values in batch.values()} == {np.dtype(np.int32)}
    np.testing.assert_array_equal(batch["targets"][:, :-1], batch["tokens"][:, 1:])


def test_one_file_keeps_its_tail_for_validation(tmp_path):
    path = tmp_path / "book.html"
    path.write_text("".join(f"line {i}\n" for i in range(100)))
    made = corpus(path, validation_fraction=0.1)
    tail = text_of(made, 1)
    assert tail.startswith("line 9")
    assert tail.endswith("line 99\n")
    head = text_of(made, 0)
    assert head + tail == path.read_text()


def test_the_fingerprint_changes_with_text_seed_and_length(folder):
    marks = [corpus(folder).fingerprint, corpus(folder).fingerprint]
    assert marks[0] == marks[1]
    marks += [corpus(folder, seed=1).fingerprint]
    marks += [corpus(folder, sequence_length=9).fingerprint]
    (folder / "0.txt").write_text("another text")
    marks += [corpus(folder).fingerprint]
    assert len(set(marks)) == 4


def test_the_order_names_what_decides_it(folder):
    order = corpus(folder).order
    assert order == {
        "text": corpus(folder).order["text"],
        "tokenizer": "bytes, 257 ids",
        "sequence_length": 8,
        "rows": len(sides_of(corpus(folder))[0]),
        "seed": 0,
        "shuffle": corpus(folder).order["shuffle"],
    }
    changed = corpus(folder, seed=1).order
    assert {key for key in order if order[key] != changed[key]} == {"seed", "shuffle"}


def test_synthetic_data_takes_the_model_s_vocabulary():
    made = corpus(
        name="synthetic", vocab_size=99, synthetic=SyntheticConfig(tokens=5000)
    )
    assert made.tokenizer.vocab_size == 99
    assert made.has_validation
    batch = next(made.train(4))
    assert batch["tokens"].shape == (4, 8)
    assert batch["tokens"].max() < 99
    assert "bytes" not in made.describe()


def test_too_little_text_says_how_little_and_what_would_do(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("x" * 100)
    small = corpus(path, sequence_length=40, validation_fraction=0)
    with pytest.raises(EmptyDataError) as caught:
        small.train(5)
    assert str(caught.value) == (
        "[T602] the training data is smaller than one batch\n"
        "  got: 101 tokens / sequence length 40 = 2 rows, and a batch takes 5\n"
        "  fix: use a batch of at most 2 rows, or a sequence length of at most 20, or "
        "more text\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T602.html"
    )
    assert next(small.train(2))["tokens"].shape == (2, 40)
    assert next(corpus(path, sequence_length=20, validation_fraction=0).train(5))
    with pytest.raises(
        EmptyDataError,
        match="batch takes 1,000\n  fix: use a batch of at most 2 rows, or more text\n",
    ):
        small.train(1000)


def test_empty_files_are_no_text(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).touch()
    assert refusal(EmptyDataError, path=tmp_path) == (
        f"[T602] there is no text in the data: text at '{tmp_path}'\n"
        "  got: every document is empty\n"
        "  fix: set data.path to files with text\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T602.html"
    )


def test_a_validation_part_without_text_is_refused(folder):
    _, (chosen,) = split(list_files(str(folder)), 1e-9)
    chosen.path.write_text("")
    text = "".join(path.read_text() for path in folder.iterdir())
    assert refusal(EmptyDataError, path=folder, validation_fraction=1e-9) == (
        f"[T602] no text is left for validation: text at '{folder}'\n"
        f"  got: data.validation_fraction=1e-09 of {len(text) + 39:,} tokens\n"
        "  fix: raise data.validation_fraction, or use 0 for no validation\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T602.html"
    )
    without = corpus(folder, validation_fraction=0)
    assert list(without.validation(4)) == []


def test_a_file_that_is_not_text_is_named(tmp_path, json_tokenizer):
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    message = refusal(
        EmptyDataError,
        path=tmp_path,
        tokenizer=str(json_tokenizer),
        validation_fraction=0,
    )
    assert message == (
        "[T602] the data file 'latin.txt' is not UTF-8 text\n"
        f"  got: {tmp_path}/latin.txt: byte 0xe9 at offset 3\n"
        "  fix: convert the file to UTF-8, leave it out, or use data.tokenizer=bytes, "
        "which accepts any file\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T602.html"
    )
    assert sides_of(corpus(tmp_path, validation_fraction=0))[0].stream.num_bytes == 8


def test_a_wrong_byte_s_place_is_counted_from_the_file_s_beginning(
    tmp_path, json_tokenizer
):
    path = tmp_path / "a.txt"
    path.write_bytes(b"a" * 95 + b"\xff" * 5)
    message = refusal(EmptyDataError, path=path, tokenizer=str(json_tokenizer))
    assert "byte 0xff at offset 95\n" in message


@pytest.fixture
def json_tokenizer(tmp_path_factory):
    library = pytest.importorskip("tokenizers")
    tokenizer = library.Tokenizer(library.models.WordLevel({"a": 0}, unk_token="a"))
    path = tmp_path_factory.mktemp("tokenizer") / "words.json"
    tokenizer.save(str(path))
    return path


def test_a_tokenizer_without_a_separator_targets_nothing_across_documents(
    tmp_path, json_tokenizer
):
    for name in ("a.txt", "b.txt", "c.txt"):
        (tmp_path / name).write_text("a")
    made = corpus(tmp_path, tokenizer=str(json_tokenizer), validation_fraction=0)
    assert sides_of(made)[0].stream.read(0, 9).tokens.tolist() == [0, 0, 0]
    assert "no separator" in made.describe()


def test_a_vocabulary_larger_than_the_model_s_is_refused(folder):
    message = (
        "[T603] the tokenizer's vocabulary is larger than the model's\n"
        "  got: bytes tokenizer: 257 ids, model: 256, and id 256 precedes every "
        "document\n"
        "  fix: use a model.vocab_size of at least 257, or a tokenizer with "
        "fewer ids\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T603.html"
    )
    assert refusal(VocabularyError, path=folder, vocab_size=256) == message
    made_up = SyntheticConfig(vocab_size=300)
    assert "synthetic tokenizer: 300 ids, model: 257" in refusal(
        VocabularyError, name="synthetic", synthetic=made_up
    )


def test_a_sequence_has_at_least_one_position():
    assert "fix: use a value of at least 1" in refusal(
        SettingValueError, sequence_length=0
    )
