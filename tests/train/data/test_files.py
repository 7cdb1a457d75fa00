# SPDX-License-Identifier: Apache-2.0
"""Which files, in which order, on which side."""

import errno
import glob
import os
import sysconfig
from pathlib import Path

import pytest

from tessera.errors import DataNotFoundError, EmptyDataError
from tessera.train.data.file_ranges import Unit
from tessera.train.data.files import list_files, list_stdlib


@pytest.fixture
def folder(tmp_path):
    names = ("b.txt", "a/c.md", "a/deep/d.py", "a/page.html", ".git/e.txt", "a/.f.txt")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def names(units: list[Unit]) -> list[str]:
    return [unit.name for unit in units]


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
        "  docs: https://tessera-spmd.github.io/tessera/errors/T602.html"
    )


def test_a_folder_gives_its_text_files_at_any_depth_without_hidden_ones(folder):
    assert names(list_files(str(folder))) == ["a/c.md", "a/deep/d.py", "b.txt"]


def test_a_glob_gives_files_of_any_kind_named_from_its_fixed_part(folder):
    assert names(list_files(f"{folder}/**/*.html")) == ["a/page.html"]
    assert names(list_files(f"{folder}/a/*")) == ["c.md", "page.html"]


def test_wildcards_take_what_python_s_glob_takes_where_there_are_no_links(folder):
    patterns = ("**", "*", "**/*", "a/**", "**/deep/*", "**/**/*.py", ".git/*", "a/.*")
    patterns += ("?/*.[mh]*", "**/*.txt", "a/**/d.py", "**/.git/*.txt", "*/deep/d.py")
    for pattern in patterns:
        paths = {*map(Path, glob.glob(f"{folder}/{pattern}", recursive=True))}
        expected = sorted(path for path in paths if path.is_file())
        found = sorted(u.path for u in list_files(f"{folder}/{pattern}"))
        assert found == expected


@pytest.mark.parametrize("pattern", ["", "/**/*.txt", "/**"])
def test_a_file_with_several_names_is_read_once_and_loops_end(tmp_path, pattern):
    for number in range(9):
        path = tmp_path / f"v2/{number}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(str(number))
    expected = names(list_files(f"{tmp_path}{pattern}"))
    for link, target in {"current": "v2", "v2/loop": "..", "v2/again": "."}.items():
        (tmp_path / link).symlink_to(target)
    (tmp_path / "a.txt").symlink_to("v2/3.txt")
    os.link(tmp_path / "v2/4.txt", tmp_path / "v2/5-of-4.txt")
    assert names(list_files(f"{tmp_path}{pattern}")) == expected
    assert len(expected) == 9


def test_a_link_that_a_glob_names_is_followed(tmp_path):
    (tmp_path / "v2").mkdir()
    (tmp_path / "v2/a.txt").write_text("a")
    (tmp_path / "current").symlink_to("v2")
    assert names(list_files(f"{tmp_path}/c*/*.txt")) == ["current/a.txt"]
    assert names(list_files(f"{tmp_path}/*/*.txt")) == ["v2/a.txt"]


def test_a_file_may_have_any_suffix_even_a_glob_s_characters(folder):
    odd = folder / "x[1].html"
    odd.write_text("hello")
    assert [(u.name, u.path.read_bytes()) for u in list_files(str(odd))] == [
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
        "  docs: https://tessera-spmd.github.io/tessera/errors/T601.html"
    )


def test_a_glob_that_matches_nothing_is_a_missing_path(folder):
    with pytest.raises(DataNotFoundError, match=r"got: no file matches .*/\*\.tex"):
        list_files(f"{folder}/*.tex")


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    (unit,) = list_files(str(tmp_path))
    with pytest.raises(DataNotFoundError) as caught, unit.open():
        pass
    assert str(caught.value) == (
        "[T601] the data file 'gone.txt' cannot be read\n"
        f"  got: {tmp_path}/gone.txt: No such file or directory\n"
        "  fix: repair the file or its permissions, or change data.path\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T601.html"
    )


def test_a_folder_without_text_files_says_which_it_looked_for(tmp_path):
    with pytest.raises(EmptyDataError) as caught:
        list_files(str(tmp_path))
    assert str(caught.value) == (
        f"[T602] the folder '{tmp_path}' has no text files\n"
        "  got: no file with a suffix .txt, .md, .rst, .py, .jsonl, .ndjson, or one of "
        "these and .gz or .zst, no .parquet file and no folder of datasets, at any "
        "depth\n"
        f"  fix: use a glob for other files: data.path='{tmp_path}/**/*.html'\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T602.html"
    )


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
        "  docs: https://tessera-spmd.github.io/tessera/errors/T601.html"
    )
