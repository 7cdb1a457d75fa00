# SPDX-License-Identifier: Apache-2.0
"""JSON lines, compressed files, and what is neither text nor JSON lines.

``tests/faults/test_data.py`` has what a run is told of files that cannot be read.
"""

import gzip
import json

import numpy as np
import pytest

from tessera.errors import DataFormatError, JsonLinesError
from tessera.training.data import DataConfig, load
from tessera.training.data.documents import Document, list_files
from tessera.training.data.formats import format_of, texts_of

TEXTS = ["Call me Ishmael.", "", "It is a truth\nuniversally known.", 'é "}{ \u2028.']


def lines_of(*texts, field="text"):
    return "".join(json.dumps({"id": 1, field: text}) + "\n" for text in texts)


def corpus(path, **settings):
    return load(
        DataConfig(name="text", path=str(path), **settings),
        sequence_length=8,
        seed=0,
        vocab_size=257,
    )


def documents_of(split, tokenizer):
    stream = split.rows.stream
    return [tokenizer.decode(part) for part in np.split(stream.tokens, stream.starts)]


def test_each_line_of_json_lines_is_a_document_of_its_text_alone(tmp_path):
    (tmp_path / "a.jsonl").write_text(lines_of(*TEXTS) + "\n\n")
    made = corpus(tmp_path / "a.jsonl", validation_fraction=0)
    assert documents_of(made.train_split, made.tokenizer) == [
        "",
        *[text for text in TEXTS if text],
    ]
    assert made.train_split.rows.stream.num_bytes == sum(
        len(text.encode()) for text in TEXTS
    )


def test_another_field_of_json_lines_is_read_by_its_name(tmp_path):
    (tmp_path / "a.ndjson").write_text(lines_of("one", "two", field="body"))
    made = corpus(tmp_path, text_field="body", validation_fraction=0)
    assert documents_of(made.train_split, made.tokenizer) == ["", "one", "two"]


def test_one_file_of_json_lines_is_cut_between_two_lines(tmp_path):
    texts = [f"text {number}" for number in range(20)]
    (tmp_path / "a.jsonl").write_text(lines_of(*texts))
    made = corpus(tmp_path / "a.jsonl", validation_fraction=0.2)
    sides = [
        documents_of(side, made.tokenizer)[1:]
        for side in (made.train_split, made.validation_split)
    ]
    assert sides == [texts[:17], texts[17:]]


@pytest.mark.parametrize("lengths", [(9000, 5, 5), (5, 5, 9000), (5, 9000)])
def test_long_lines_are_left_whole_and_both_sides_have_some(tmp_path, lengths):
    (tmp_path / "a.jsonl").write_text(lines_of(*("a" * n for n in lengths)))
    made = corpus(tmp_path / "a.jsonl", validation_fraction=0.5)
    train, validation = (
        documents_of(side, made.tokenizer)[1:]
        for side in (made.train_split, made.validation_split)
    )
    assert train
    assert validation
    assert [len(text) for text in train + validation] == list(lengths)


def test_a_line_after_the_cut_keeps_its_number(tmp_path):
    (tmp_path / "a.jsonl").write_text(lines_of(*["text"] * 50) + "{}\n")
    with pytest.raises(JsonLinesError) as caught:
        corpus(tmp_path / "a.jsonl", validation_fraction=0.3)
    assert str(caught.value) == (
        "[T607] line 51 of the data file 'a.jsonl' has no text\n"
        f"  got: {tmp_path}/a.jsonl, line 51: it has no field 'text'; Known: none\n"
        '  fix: write one JSON object a line, with its text in the field "text"\n'
        "  fix: or use another field: data.text_field=<name>\n"
        "  fix: or train on the raw lines: data.format=text\n"
        "  docs: docs/errors/T607.md"
    )


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_what_is_compressed_gives_the_same_tokens(tmp_path, name):
    content = lines_of(*["some words"] * 9).encode()
    (tmp_path / name).write_bytes(content)
    (tmp_path / "gz").mkdir()
    (tmp_path / "gz" / f"{name}.gz").write_bytes(gzip.compress(content))
    plain = corpus(tmp_path / name, validation_fraction=0.3)
    for path in (tmp_path / "gz", tmp_path / "gz" / f"{name}.gz"):
        packed = corpus(path, validation_fraction=0.3)
        assert packed.fingerprint == plain.fingerprint


def test_a_folder_gives_its_json_lines_too(tmp_path):
    for name in ("a.jsonl", "b.jsonl.gz", "c.txt", "d.json", "e.parquet"):
        (tmp_path / name).touch()
    assert [document.name for document in list_files(str(tmp_path))] == [
        "a.jsonl",
        "b.jsonl.gz",
        "c.txt",
    ]


@pytest.mark.parametrize(
    ("name", "asked", "expected"),
    [
        ("a.jsonl", "auto", "jsonl"),
        ("a.JSONL.gz", "auto", "jsonl"),
        ("a.html", "auto", "text"),
        ("README", "auto", "text"),
        ("a.jsonl", "text", "text"),
        ("a.csv", "text", "text"),
        ("a.json", "jsonl", "jsonl"),
    ],
)
def test_the_ending_says_how_a_file_is_read_unless_the_setting_does(
    tmp_path, name, asked, expected
):
    assert format_of(Document(name, tmp_path / name), asked) == expected


def test_text_takes_the_bytes_of_anything_as_they_are(tmp_path):
    content = bytes(range(256)) * 4
    (tmp_path / "a.parquet").write_bytes(content)
    made = corpus(tmp_path / "a.parquet", format="text", validation_fraction=0)
    assert made.train_split.rows.stream.tokens.tolist() == [256, *content]


def test_a_format_that_is_not_read_says_what_to_do(tmp_path):
    (tmp_path / "a.json").write_text("[]")
    (document,) = list_files(str(tmp_path / "a.json"))
    with pytest.raises(DataFormatError) as caught:
        list(texts_of(document, "auto", "text"))
    assert str(caught.value) == (
        "[T606] the data file 'a.json' is not text\n"
        f"  got: {tmp_path}/a.json: JSON, by its suffix .json\n"
        '  fix: write its texts as lines {"text": …} to a file with the suffix .jsonl: '
        "jq -c '.[]' a.json > texts.jsonl\n"
        "  fix: or train on the raw bytes: data.format=text\n"
        "  docs: docs/errors/T606.md"
    )
