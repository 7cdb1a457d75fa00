# SPDX-License-Identifier: Apache-2.0
"""JSON lines, compressed files, and what is neither text nor JSON lines.

``tests/faults/test_data.py`` has what a run is told of files that cannot be read.
"""

import gzip
import importlib
import json
import sys
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from tessera.errors import BadRecordError, DataFormatError
from tessera.train.data import DataConfig, load, preparation, records
from tessera.train.data.files import list_files, units_of
from tessera.train.data.records import read_records

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


def documents_of(rows, tokenizer):
    tokens, starts, _ = rows.stream.read(0, 10**9)
    return [tokenizer.decode(part) for part in np.split(tokens, starts)]


def test_each_line_of_json_lines_is_a_document_of_its_text_alone(tmp_path):
    (tmp_path / "a.jsonl").write_text(lines_of(*TEXTS) + "\n\n")
    made = corpus(tmp_path / "a.jsonl", validation_fraction=0)
    assert documents_of(made.sources[0].train_rows, made.tokenizer) == [
        "",
        *[text for text in TEXTS if text],
    ]
    assert made.sources[0].train_rows.stream.num_bytes == sum(
        len(text.encode()) for text in TEXTS
    )


def test_another_field_of_json_lines_is_read_by_its_name(tmp_path):
    (tmp_path / "a.ndjson").write_text(lines_of("one", "two", field="body"))
    made = corpus(tmp_path, text_key="body", validation_fraction=0)
    assert documents_of(made.sources[0].train_rows, made.tokenizer) == [
        "",
        "one",
        "two",
    ]


def test_one_file_of_json_lines_is_cut_between_two_lines(tmp_path):
    texts = [f"text {number}" for number in range(20)]
    (tmp_path / "a.jsonl").write_text(lines_of(*texts))
    made = corpus(tmp_path / "a.jsonl", validation_fraction=0.2)
    sides = [
        documents_of(side, made.tokenizer)[1:]
        for side in (made.sources[0].train_rows, made.sources[0].validation_rows)
    ]
    assert sides == [texts[:17], texts[17:]]


@pytest.mark.parametrize("lengths", [(9000, 5, 5), (5, 5, 9000), (5, 9000)])
def test_long_lines_are_left_whole_and_both_sides_have_some(tmp_path, lengths):
    (tmp_path / "a.jsonl").write_text(lines_of(*("a" * n for n in lengths)))
    made = corpus(tmp_path / "a.jsonl", validation_fraction=0.5)
    train, validation = (
        documents_of(side, made.tokenizer)[1:]
        for side in (made.sources[0].train_rows, made.sources[0].validation_rows)
    )
    assert train
    assert validation
    assert [len(text) for text in train + validation] == list(lengths)


def test_a_line_after_the_cut_keeps_its_number(tmp_path):
    (tmp_path / "a.jsonl").write_text(lines_of(*["text"] * 50) + "{}\n")
    with pytest.raises(BadRecordError) as caught:
        corpus(tmp_path / "a.jsonl", validation_fraction=0.3)
    assert str(caught.value) == (
        "[T607] line 51 of the data file 'a.jsonl' has no text\n"
        f"  got: {tmp_path}/a.jsonl, line 51: it has no key 'text'; Known: none\n"
        '  fix: write one JSON object a line, with its text under "text"\n'
        "  fix: or use another key: data.text_key=<name>\n"
        "  fix: or train on the raw lines: data.format=text\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T607.html"
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
    for name in ("a.jsonl", "b.jsonl.gz", "c.txt", "d.json", "e.parquet", "f.arrow"):
        (tmp_path / name).touch()
    assert [document.name for document in list_files(str(tmp_path))] == [
        "a.jsonl",
        "b.jsonl.gz",
        "c.txt",
        "e.parquet",
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
    (tmp_path / name).touch()
    (unit,) = list_files(str(tmp_path / name), asked)
    assert unit.format == expected


def test_text_takes_the_bytes_of_anything_as_they_are(tmp_path):
    content = bytes(range(256)) * 4
    (tmp_path / "a.parquet").write_bytes(content)
    made = corpus(tmp_path / "a.parquet", format="text", validation_fraction=0)
    assert made.sources[0].train_rows.stream.read(0, 10**9).tokens.tolist() == [
        256,
        *content,
    ]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_compressed_table_is_not_read(tmp_path, suffix):
    (tmp_path / f"a.parquet{suffix}").touch()
    with pytest.raises(DataFormatError, match="a compressed table, by its suffixes"):
        list_files(str(tmp_path / f"a.parquet{suffix}"))


def test_a_format_that_is_not_read_says_what_to_do(tmp_path):
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(DataFormatError) as caught:
        list_files(str(tmp_path / "a.json"))
    assert str(caught.value) == (
        "[T606] the data file 'a.json' is not text\n"
        f"  got: {tmp_path}/a.json: another format, by its suffix .json\n"
        '  fix: write its texts as lines {"text": …} to a file with the suffix .jsonl: '
        "jq -c '.[]' a.json > texts.jsonl\n"
        "  fix: or train on the raw bytes: data.format=text\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T606.html"
    )


def records_of(path, **settings):
    config = DataConfig(name="text", path=str(path), **settings)
    units = units_of(replace(config, validation_fraction=0))[0]
    return [r for unit in units for r in read_records(unit, config, set())]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b'{"text": 1}', "its 'text' is a number, not text"),
        (b'["text"]', "it is an array, not an object"),
        (b'{"text": null}', "its 'text' is null, not text"),
        (b'{"body": "x"}', "it has no key 'text'; "),
        (b'{"text": "x"', "it is not JSON: "),
        (b'{"text": "caf\xe9"}', "it is not UTF-8: byte 0xe9"),
        (b'{"text": "\\ud83d"}', "its text has half of a surrogate pair"),
    ],
)
def test_a_bad_record_is_an_error_with_its_line(tmp_path, bad, reason):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n\n' + bad + b'\n{"text": "good"}\n')
    with pytest.raises(BadRecordError) as caught:
        records_of(path)
    assert f"got: {path}, line 3: {reason}" in str(caught.value)


def test_a_bad_record_says_how_many_after_it_are_bad_too(tmp_path, monkeypatch):
    path, good = tmp_path / "a.jsonl", '{"text": "good"}\n'

    def message(content, **settings):
        path.write_text(content)
        with pytest.raises(BadRecordError) as caught:
            corpus(path, cache_dir=str(tmp_path / "cache"), **settings)
        return str(caught.value)

    # Those of the validation text count, too: the last line is of it.
    named = "; ".join(f"a.jsonl, line {n}" for n in (4, 6, 8, 10, 12))
    assert (
        f"  got: {path}, line 2: its 'text' is a number, not text\n"
        f"  got: 8 of the 16 records after it are bad, too: {named}; …\n"
    ) in message((good + '{"text": 1}\n') * 9, validation_fraction=0.2)
    monkeypatch.setattr(preparation, "_LOOK_AHEAD", 3)
    text = message(('{"text": 1}\n' + good) * 9)
    assert "  got: 1 of the 3 records after it are bad, too: a.jsonl, line 3\n" in text
    assert "bad, too" not in message(good + '{"text": 1}\n' + good * 9)


def test_conversations_without_their_setting_say_which_it_is(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": 1, "chat": [{"role": "user", "content": "hi"}]}\n')
    with pytest.raises(BadRecordError) as caught:
        records_of(path)
    reason = "it has no key 'text'; for its conversation, write data.messages_key=chat"
    assert reason in str(caught.value)
    assert records.conversation_setting(str(path)) == " data.messages_key=chat"
    path.write_text('{"text": "a", "chat": []}\n')
    assert records.conversation_setting(str(path)) == ""
    assert records.conversation_setting(str(tmp_path)) == ""


def test_a_text_file_of_many_megabytes_is_several_documents(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "MOST_TEXT_BYTES", 10)
    path = tmp_path / "a.txt"
    for content in (
        b"one\ntwo\nthree\nfour\n",
        "€".encode() * 9,
        b"x" * 25,
        b"\n" * 11,
    ):
        path.write_bytes(content)
        made = records_of(path)
        assert b"".join(r.text for r in made) == content
        assert len(made) > 1
        for record in made:
            record.text.decode()
            assert content[record.offset :].startswith(record.text)
    path.write_bytes(b"one\ntwo\nthree\n\0")
    with pytest.raises(DataFormatError, match="0x00 at offset 14"):
        records_of(path)


def test_a_line_that_is_too_long_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "_MOST_RECORD_BYTES", 20)
    (tmp_path / "a.jsonl").write_text('{"text": "b"}\n' + lines_of("a" * 99))
    with pytest.raises(BadRecordError, match=r"line 2: it is longer than "):
        records_of(tmp_path / "a.jsonl")


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_a_line_of_any_length_takes_little_memory(tmp_path, monkeypatch, suffix):
    pytest.importorskip("pyarrow")
    monkeypatch.setattr(records, "_MOST_RECORD_BYTES", 2**20)
    path = tmp_path / f"a.jsonl{suffix}"
    content = lines_of("b").encode() + b"a" * 40 * 2**20 + b"\n"
    content += lines_of("c", "d").encode()
    if suffix == ".zst":
        arrow = importlib.import_module("pyarrow")
        with arrow.CompressedOutputStream(str(path), "zstd") as stream:
            stream.write(content)
    else:
        path.write_bytes(gzip.compress(content, 1) if suffix else content)
    del content
    texts, refused = [], []
    tracemalloc.start()
    try:
        config = DataConfig(name="text", path=str(path), validation_fraction=0.5)
        sides = units_of(config)
        for unit in (unit for side in sides for unit in side):
            try:
                texts.extend(r.text for r in read_records(unit, config, set()))
            except BadRecordError as error:
                refused.append(str(error))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert texts == ["b", "c", "d"]
    assert len(refused) == 1
    assert "line 2: it is longer than 1 MiB" in refused[0]
    assert peak < 8 * 2**20


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines_of("one").encode())
    assert [r.text for r in records_of(tmp_path)] == ["one"]


def test_zstd_gives_the_same_records_also_of_several_frames(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    path = tmp_path / "a.jsonl.zst"
    for part in ("one", "two"):
        with arrow.CompressedOutputStream(
            arrow.OSFile(str(path) + part, "wb"), "zstd"
        ) as f:
            f.write(lines_of(part).encode())
        with path.open("ab") as whole:
            whole.write((tmp_path / f"a.jsonl.zst{part}").read_bytes())
    assert [r.text for r in records_of(path)] == ["one", "two"]
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DataFormatError, match="cannot be decompressed"):
        records_of(path)


def test_a_missing_library_of_a_format_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl.zst").touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataFormatError, match=r"pip install 'tessera-spmd\[data\]'"):
        records_of(tmp_path / "a.jsonl.zst")
