# SPDX-License-Identifier: Apache-2.0
"""Texts and messages of Parquet files."""

import json
import re
from dataclasses import replace

import pytest

from tessera.errors import (
    BadRecordError,
    DataFormatError,
    SettingConflictError,
)
from tessera.train.data import DataConfig, load, preparation, records
from tessera.train.data import table_files as tables
from tessera.train.data.file_ranges import divide, split
from tessera.train.data.files import list_files, units_of
from tessera.train.data.records import read_records

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

TEXTS = [f"text {i}" for i in range(200)]


def write_parquet(path, values, row_group_size=30, **columns):
    table = arrow.table({"id": range(len(values)), "text": values, **columns})
    parquet.write_table(table, path, row_group_size=row_group_size)


def read(units, **settings):
    config = DataConfig(name="text", path="x", **settings)
    return [r for unit in units for r in read_records(unit, config, set())]


@pytest.mark.parametrize("fraction", [0.001, 0.27, 0.999])
def test_each_row_is_a_document_once_also_of_a_part(tmp_path, fraction):
    path = tmp_path / "a.parquet"
    write_parquet(path, TEXTS)
    (whole,) = list_files(str(path))
    sides = split([whole], fraction)
    records = [read([part]) for side in sides for part in divide(side[0], 1)]
    assert [r.text for part in records for r in part] == TEXTS
    assert [r.offset for part in records for r in part] == [*range(200)]
    assert records[-1][-1].name == f"{path.name}, row 200"
    assert all(read(side) for side in sides)
    # Row groups of 30 rows: no part begins inside of one, except at the cut.
    begins = {part.begin for side in sides for part in divide(side[0], 1)}
    assert begins == {0, sides[1][0].begin, *range(0, 200, 30)}


@pytest.mark.parametrize(
    "names", [["dataset_dict.json"], ["dataset_info.json", "state.json"]]
)
def test_a_folder_that_datasets_saved_is_refused(tmp_path, names):
    """Its Arrow files would be left out."""
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "web").mkdir()
    for name in names:
        (tmp_path / "web" / name).write_text("{}")
    with pytest.raises(DataFormatError) as caught:
        list_files(str(tmp_path))
    assert f"got: {tmp_path / 'web'}\n" in str(caught.value)
    assert "to_parquet" in caught.value.fix
    (tmp_path / "web" / "data-00000-of-00001.arrow").touch()
    with pytest.raises(DataFormatError, match=r"by its suffix \.arrow"):
        list_files(str(tmp_path / "web" / "*.arrow"))


def test_a_column_that_does_not_exist_names_the_others(tmp_path):
    write_parquet(tmp_path / "a.parquet", TEXTS)
    with pytest.raises(BadRecordError) as caught:
        read(list_files(str(tmp_path)), text_key="body")
    assert "has no column 'body'\n  got: " in str(caught.value)
    assert "a.parquet has id, text\n" in str(caught.value)


def test_a_row_without_a_text_is_an_error_with_its_number(tmp_path):
    path = tmp_path / "a.parquet"
    write_parquet(path, ["one", None, "three"])
    with pytest.raises(BadRecordError) as caught:
        read(list_files(str(path)))
    assert f"got: {path}, row 2: its 'text' is null, not text\n" in str(caught.value)
    assert caught.value.fix == "use another key: data.text_key=<name>"
    with pytest.raises(BadRecordError, match="row 1 of the data file"):
        read(list_files(str(path)), text_key="id")
    write_parquet(path, ["one", "x" * 7])
    # A text that is not UTF-8, which Arrow does not check.
    path.write_bytes(path.read_bytes().replace(b"x" * 7, b"\xff" * 7))
    with pytest.raises(BadRecordError, match="row 2: it is not UTF-8: byte 0xff"):
        read(list_files(str(path)))


def test_bytes_of_a_table_are_utf8_text_or_named(tmp_path):
    path = tmp_path / "a.parquet"
    write_parquet(path, ["é".encode(), b""])
    assert [r.text for r in read(list_files(str(path)))] == ["é", ""]
    write_parquet(path, ["é".encode(), b"\xff"])
    with pytest.raises(BadRecordError, match="row 2: it is not UTF-8: byte 0xff"):
        read(list_files(str(path)))
    days = arrow.array([1, None], arrow.date32())
    write_parquet(path, ["", ""], day=days)
    with pytest.raises(BadRecordError, match="'day' is of the type date, not text"):
        read(list_files(str(path)), text_key="day")


@pytest.mark.parametrize("kind", ["parquet", "categories"])
@pytest.mark.parametrize("long", ["x" * 3001, "€" * 1001])
def test_a_value_that_is_too_long_is_an_error(tmp_path, monkeypatch, kind, long):
    monkeypatch.setattr(records, "_MOST_RECORD_BYTES", 3000)
    texts = ["one", "é" * 1400] + ["y" * 2900] * 99
    for values in (texts, [*texts, long]):
        column = arrow.array(values)
        if kind == "categories":
            column = column.dictionary_encode()
        write_parquet(tmp_path / "a.parquet", column, row_group_size=40)
        units = list_files(str(tmp_path / "a.parquet"))
        if values is texts:
            assert [r.text for r in read(units)] == texts
    with pytest.raises(BadRecordError, match="row 102: it is longer than "):
        read(units)


@pytest.mark.full
def test_a_table_that_takes_all_memory_ends_nothing(tmp_path, monkeypatch):
    """A part of it is decompressed whole, and 60 KB may become gigabytes."""
    monkeypatch.setattr(preparation, "READER_BYTES", 2**30)
    path = tmp_path / "a.parquet"
    table = arrow.table({"text": ["x" * 2**27]})
    table = arrow.concat_tables([table] * 8).combine_chunks()
    parquet.write_table(table, path, compression="zstd", use_dictionary=False)
    assert path.stat().st_size < 2**20
    config = DataConfig("text", str(path), cache_dir=str(tmp_path / "cache"))
    with pytest.raises(DataFormatError, match="takes too much memory"):
        load(config, sequence_length=8, seed=0, vocab_size=257)


def test_a_lack_of_memory_is_no_damage_of_a_table(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise MemoryError

    write_parquet(tmp_path / "a.parquet", TEXTS)
    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", fail)
    with pytest.raises(DataFormatError, match=r"T606.* takes too much memory"):
        read(list_files(str(tmp_path / "a.parquet")))


def test_a_value_that_finds_no_memory_is_no_bad_record():
    class Scalar:
        def as_py(self):
            raise MemoryError

    with pytest.raises(MemoryError):
        list(tables._values([Scalar()]))


def test_messages_are_read_from_rows_and_lines(tmp_path):
    messages = [
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}],
        [{"role": "user", "content": "why?"}],
    ]
    write_parquet(tmp_path / "a.parquet", ["", ""], messages=messages)
    lines = [json.dumps({"messages": one}) for one in messages]
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    records = read(list_files(str(tmp_path)), messages_key="messages")
    assert [r.conversation.messages for r in records] == messages * 2


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "its 'messages' is null, not a list of messages"),
        ([], "its 'messages' is an empty array, not a list of messages"),
        ("hi", "its 'messages' is text, not a list of messages"),
        (["hi"], "message 1 of its 'messages' is text, not an object"),
        ([{"role": "user"}], "message 1 of its 'messages' has no 'content'"),
        ([{"content": "hi"}], "message 1 of its 'messages' has no 'role'"),
        ([{"role": "user", "content": None}], "its 'messages[0].content' is null"),
        ([{"role": "user", "content": ["text"]}], "its 'messages[0].content' is an"),
    ],
)
def test_a_list_that_has_no_messages_is_a_bad_record(tmp_path, value, reason):
    (tmp_path / "b.jsonl").write_text(json.dumps({"messages": value}))
    with pytest.raises(BadRecordError, match=f"line 1: {re.escape(reason)}"):
        read(list_files(str(tmp_path)), messages_key="messages")


def test_messages_need_records(tmp_path):
    (tmp_path / "a.txt").write_text("hi")
    config = DataConfig(name="text", path=str(tmp_path), messages_key="messages")
    with pytest.raises(SettingConflictError, match="needs records, and a file is"):
        units_of(config)
    (tmp_path / "b.jsonl").write_text("{}")
    with pytest.raises(SettingConflictError, match="needs records, and a file is"):
        units_of(replace(config, validation_fraction=0))


@pytest.mark.parametrize("content", [b"", b"PAR1", b"x" * 99])
def test_a_file_that_is_no_table_is_named(tmp_path, content):
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(DataFormatError, match=r"T606.* cannot be read as "):
        read(list_files(str(tmp_path / "a.parquet")))


def test_a_table_is_read_in_small_batches(tmp_path):
    write_parquet(tmp_path / "a.parquet", TEXTS)
    rows = tables.read_columns(tmp_path / "a.parquet", ["text"], 130, 140)
    expected = [{"text": text} for text in TEXTS[130:140]]
    assert [*rows] == [*enumerate(expected, 130)]
