# SPDX-License-Identifier: Apache-2.0
"""How files are cut: into train and validation, and into parts for workers."""

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.train.data.file_ranges import Unit, divide, split


def names(units: list[Unit]) -> list[str]:
    return [unit.name for unit in units]


def content_of(unit: Unit) -> bytes:
    with unit.open(unit.begin) as stream:
        return stream.read(-1 if unit.end is None else unit.end - unit.begin)


file_names = st.lists(st.text("abc/", min_size=1), min_size=2, max_size=30, unique=True)
fractions = st.floats(0.01, 0.99)


@given(file_names, fractions)
def test_every_file_is_on_one_side_and_no_side_is_empty(found, fraction):
    documents = [Unit(name, Path()) for name in found]
    train, validation = split(documents, fraction)
    assert train
    assert validation
    assert sorted(names(train + validation)) == sorted(found)


@given(file_names, fractions)
def test_the_split_depends_on_the_paths_alone(found, fraction):
    documents = [Unit(name, Path("here", name)) for name in found]
    elsewhere = [Unit(name, Path("there", name)) for name in reversed(found)]
    for here, there in zip(
        split(documents, fraction), split(elsewhere, fraction), strict=True
    ):
        assert set(names(here)) == set(names(there))


def test_a_file_stays_on_its_side_when_others_come():
    many = [Unit(f"{i}.txt", Path()) for i in range(200)]
    few = many[:100]
    validation = set(split(many, 0.2)[1])
    assert set(split(few, 0.2)[1]) == validation & set(few)
    assert 20 < len(validation) < 60


def test_no_fraction_keeps_everything_for_training():
    documents = [Unit("a", Path()), Unit("b", Path())]
    assert split(documents, 0) == (documents, [])


@given(st.text("aé€😀\n", min_size=1, max_size=60).map(str.encode), fractions)
def test_one_file_is_cut_between_lines_or_characters(content, fraction):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.txt")
        path.write_bytes(content)
        (train,), (validation,) = split([Unit("a.txt", path)], fraction)
        head, tail = content_of(train), content_of(validation)
    assert head + tail == content
    head.decode(), tail.decode()  # each would raise inside a character
    cut = int(len(content) * (1 - fraction))
    if b"\n" in content[cut : (cut + len(content)) // 2]:
        assert head.endswith(b"\n")
    else:
        assert 0 <= len(head) - cut <= 3


def test_a_file_name_may_be_no_text():
    documents = [Unit(os.fsdecode(b"\xff.txt"), Path()), Unit("b", Path())]
    assert len(split(documents, 0.5)[0]) == 1


@given(
    st.lists(st.text("ab {}\r", max_size=9), max_size=30),
    st.integers(1, 40),
    st.sampled_from(["text", "jsonl"]),
)
def test_parts_are_all_of_a_file_cut_between_lines(lines, size, kind):
    content = "\n".join(lines).encode()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a")
        path.write_bytes(content)
        whole = Unit("a", path, kind, begin=min(3, len(content)))
        parts = divide(whole, size)
        assert b"".join(map(content_of, parts)) == content[whole.begin :]
    for part in parts[1:]:
        assert kind == "text" or content[part.begin - 1 : part.begin] == b"\n"
        assert part.begin < len(content)
    assert parts[-1].end is None


def test_a_compressed_file_is_one_part(tmp_path):
    whole = Unit("a.jsonl.gz", tmp_path / "a.jsonl.gz", "jsonl")
    assert divide(whole, 1) == [whole]


def test_the_identity_changes_with_the_file_and_the_range(tmp_path):
    path = tmp_path / "a"
    path.write_text("one\ntwo\n")
    unit = Unit("a", path)
    first = unit.identity
    assert first == unit.identity
    assert first != Unit("a", path, begin=4).identity
    os.utime(path, ns=(0, 0))
    assert first != unit.identity


@pytest.mark.parametrize("offset", [0, 3, 4, 7, 8])
def test_the_number_of_a_line_is_counted_from_the_file_s_beginning(tmp_path, offset):
    path = tmp_path / "a"
    path.write_text("one\ntwo\n")
    assert Unit("a", path).line_at(offset) == "one\ntwo\n"[:offset].count("\n") + 1
