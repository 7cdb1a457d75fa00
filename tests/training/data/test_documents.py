# SPDX-License-Identifier: Apache-2.0
"""Which files, in which order, on which side."""

import errno
import os
import sysconfig
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.errors import DataNotFoundError, EmptyDataError
from tessera.training.data.documents import Document, list_files, list_stdlib, split


@pytest.fixture
def folder(tmp_path):
    names = ("b.txt", "a/c.md", "a/deep/d.py", "a/page.html", ".git/e.txt", "a/.f.txt")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def names(documents: list[Document]) -> list[str]:
    return [document.name for document in documents]


def test_the_standard_library_is_there_without_tests_tables_or_packages():
    found = names(list_stdlib())
    assert {"argparse.py", "asyncio/events.py", "json/decoder.py"} < set(found)
    assert found == sorted(found)
    left_out = {"test", "tests", "encodings", "pydoc_data", "tkinter", "site-packages"}
    assert not [name for name in found if left_out & set(name.split("/"))]
    assert "_sysconfigdata" not in "".join(found)  # differs between machines


def test_a_python_without_its_sources_says_what_to_use(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(EmptyDataError) as caught:
        list_stdlib()
    assert str(caught.value) == (
        "[T602] this Python has no source text of its standard library\n"
        f"  got: no .py files of the standard library in {tmp_path}\n"
        "  fix: use data=text data.path=<a file, a folder or a glob>\n"
        "  docs: docs/errors/T602.md"
    )


def test_a_folder_gives_its_text_files_at_any_depth_without_hidden_ones(folder):
    assert names(list_files(str(folder))) == ["a/c.md", "a/deep/d.py", "b.txt"]


def test_a_glob_gives_files_of_any_kind_named_from_its_fixed_part(folder):
    assert names(list_files(f"{folder}/**/*.html")) == ["a/page.html"]
    assert names(list_files(f"{folder}/a/*")) == ["c.md", "page.html"]


def test_a_file_may_have_any_suffix_even_a_glob_s_characters(folder):
    odd = folder / "x[1].html"
    odd.write_text("hello")
    assert [(d.name, d.read()) for d in list_files(str(odd))] == [
        ("x[1].html", b"hello")
    ]


def test_a_path_may_begin_at_home(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    assert names(list_files("~/a/c.md")) == ["c.md"]


def test_a_missing_path_says_how_far_it_goes(folder):
    with pytest.raises(DataNotFoundError) as caught:
        list_files(f"{folder}/a/depe/x.txt")
    assert str(caught.value) == (
        f"[T601] there is no data at '{folder}/a/depe/x.txt'\n"
        f"  got: {folder}/a has no 'depe'\n"
        "  fix: set data.path to a file, a folder or a glob that exists\n"
        "  docs: docs/errors/T601.md"
    )


def test_a_glob_that_matches_nothing_is_a_missing_path(folder):
    with pytest.raises(DataNotFoundError, match=r"got: no file matches .*/\*\.tex"):
        list_files(f"{folder}/*.tex")


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    (document,) = list_files(str(tmp_path))
    with pytest.raises(DataNotFoundError) as caught:
        document.read()
    assert str(caught.value) == (
        "[T601] the data file 'gone.txt' cannot be read\n"
        f"  got: {tmp_path}/gone.txt: No such file or directory\n"
        "  fix: repair the file or its permissions, or change data.path\n"
        "  docs: docs/errors/T601.md"
    )


def test_a_folder_without_text_files_says_which_it_looked_for(tmp_path):
    with pytest.raises(EmptyDataError) as caught:
        list_files(str(tmp_path))
    assert str(caught.value) == (
        f"[T602] the folder '{tmp_path}' has no text files\n"
        "  got: no file with a suffix .txt, .md, .rst, .py, .jsonl, .ndjson, or one of "
        "these and .gz, at any depth\n"
        f"  fix: use a glob for other files: data.path='{tmp_path}/**/*.html'\n"
        "  docs: docs/errors/T602.md"
    )


file_names = st.lists(st.text("abc/", min_size=1), min_size=2, max_size=30, unique=True)
fractions = st.floats(0.01, 0.99)


@given(file_names, fractions)
def test_every_file_is_on_one_side_and_no_side_is_empty(found, fraction):
    documents = [Document(name, Path()) for name in found]
    train, validation = split(documents, fraction)
    assert train
    assert validation
    assert sorted(names(train + validation)) == sorted(found)


@given(file_names, fractions)
def test_the_split_depends_on_the_paths_alone(found, fraction):
    documents = [Document(name, Path("here", name)) for name in found]
    elsewhere = [Document(name, Path("there", name)) for name in reversed(found)]
    for here, there in zip(
        split(documents, fraction), split(elsewhere, fraction), strict=True
    ):
        assert set(names(here)) == set(names(there))


def test_a_file_stays_on_its_side_when_others_come():
    many = [Document(f"{i}.txt", Path()) for i in range(200)]
    few = many[:100]
    validation = set(split(many, 0.2)[1])
    assert set(split(few, 0.2)[1]) == validation & set(few)
    assert 20 < len(validation) < 60


def test_no_fraction_keeps_everything_for_training():
    documents = [Document("a", Path()), Document("b", Path())]
    assert split(documents, 0) == (documents, [])


@given(st.text("aé€😀\n", min_size=1, max_size=60).map(str.encode), fractions)
def test_one_file_is_cut_between_lines_or_characters(content, fraction):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.txt")
        path.write_bytes(content)
        (train,), (validation,) = split([Document("a.txt", path)], fraction)
        head, tail = train.read(), validation.read()
    assert head + tail == content
    head.decode(), tail.decode()  # each would raise inside a character
    cut = int(len(content) * (1 - fraction))
    if b"\n" in content[cut : (cut + len(content)) // 2]:
        assert head.endswith(b"\n")
    else:
        assert 0 <= len(head) - cut <= 3


def test_a_file_name_may_be_no_text():
    documents = [Document(os.fsdecode(b"\xff.txt"), Path()), Document("b", Path())]
    assert len(split(documents, 0.5)[0]) == 1


def test_a_folder_that_cannot_be_read_is_named_and_not_left_out(folder, monkeypatch):
    scan = os.scandir

    def refuse(path):
        if str(path) == f"{folder}/a/deep":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataNotFoundError) as caught:
        list_files(str(folder))
    assert str(caught.value) == (
        "[T601] a folder of the data cannot be read\n"
        f"  got: {folder}/a/deep: Permission denied\n"
        "  fix: repair its permissions, or change data.path\n"
        "  docs: docs/errors/T601.md"
    )
