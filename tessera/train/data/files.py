# SPDX-License-Identifier: Apache-2.0
"""Finds the data files of a run, and the units of its train and validation text.

A file is identified by its path relative to the corpus. Order, split and format depend
only on those relative paths, so every machine and process with the same files has the
same text in the same split.
"""

import fnmatch
import glob
import os
import sys
import sysconfig
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Final

from tessera.errors import (
    DataFormatError,
    DataNotFoundError,
    EmptyDataError,
    SettingConflictError,
)
from tessera.train.data.data_config import RECORDS, DataConfig
from tessera.train.data.file_ranges import (
    COMPRESSIONS,
    JSON_LINES,
    TEXT,
    Unit,
    decompressed_name,
    divide,
    split,
)
from tessera.train.data.hub_files import download_files
from tessera.train.data.records import not_text
from tessera.train.data.table_files import PARQUET
from tessera.train.files.hub import PREFIX, HubName
from tessera.train.files.regular_files import is_kernel_file

TEXT_SUFFIXES: Final = (".txt", ".md", ".rst", ".py", ".jsonl", ".ndjson")
_FOLDER_SUFFIXES: Final = (*TEXT_SUFFIXES, ".parquet")
_FORMATS: Final[Mapping[str, str]] = MappingProxyType(
    {".jsonl": JSON_LINES, ".ndjson": JSON_LINES, ".parquet": PARQUET}
)
# Some are text, which nobody means to train on as it is.
_REFUSED: Final = (
    ".json .csv .tsv .xlsx .xls .ods .arrow .feather .orc .avro .db .sqlite .sqlite3 "
    ".duckdb .zip .tar .tgz .7z .rar .bz2 .xz .lz4 .npy .npz .pt .pth .h5 .hdf5 "
    ".safetensors .bin .tfrecord .mds .pkl .pickle .joblib .pdf .docx .doc .odt .epub"
)

# Generated tables, then packages that some distributions install separately: with
# them the corpus would differ between machines with the same Python.
_STDLIB_EXCLUDED = frozenset({"encodings", "pydoc_data"}) | frozenset(
    {"distutils", "ensurepip", "idlelib", "lib2to3", "tkinter", "turtledemo", "venv"}
)
_TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})


def list_stdlib() -> list[Unit]:
    """The modules of this Python's standard library that are written in Python.

    Excluded are tests, generated tables, and packages that some distributions install
    separately (see ``docs/guides/data.md``).

    Raises:
      EmptyDataError: [T602] this Python has no source text installed.

    Example:
      >>> "asyncio/events.py" in {unit.name for unit in list_stdlib()}
      True
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    included = sys.stdlib_module_names - _STDLIB_EXCLUDED
    units = [
        unit
        for unit in _walk(root, (".py",), skip=_TEST_FOLDERS)
        if unit.name.split("/")[0].removesuffix(".py") in included
    ]
    if not units:
        raise EmptyDataError(
            "this Python has no source text of its standard library",
            got=f"no .py files of the standard library in {root}",
            fix="use data=text data.path=<a file, a folder or a glob>",
        )
    return units


def units_of(config: DataConfig) -> tuple[list[Unit], list[Unit]]:
    """The units of the training and of the validation text.

    They are in the order of the documents: files by relative path, and the units of a
    file one after another.

    Args:
      config: The settings of ``stdlib`` or ``text``.

    Raises:
      DataNotFoundError: [T601] a path does not exist or cannot be read.
      EmptyDataError: [T602] there are no text files.
      DataFormatError: [T606] a file has another format.
      SettingConflictError: [T507] a setting has no effect on these files.
      HubError: [T719] the Hub does not give the data set.
    """
    if config.name == "stdlib":
        files = list_stdlib()
    else:
        if config.path.startswith(PREFIX):
            files = _of_hub(config)
        else:
            files = list_files(config.path, config.format)
        _check_keys(config, files)
    train, validation = split(files, config.validation_fraction)
    return (
        [part for unit in train for part in divide(unit)],
        [part for unit in validation for part in divide(unit)],
    )


def _of_hub(config: DataConfig) -> list[Unit]:
    """The files of a data set of the Hub, by their paths in it."""
    folder, paths = download_files(config.path, config.split, config.subset)
    units = [Unit(path.relative_to(folder).as_posix(), path) for path in paths]
    return [replace(unit, format=_format(unit, config.format)) for unit in units]


def _check_keys(config: DataConfig, files: list[Unit]) -> None:
    texts = [unit for unit in files if unit.format == TEXT]
    needs = config.messages_key and f"data.messages_key={config.messages_key}"
    if config.name in RECORDS:
        needs = f"data={config.name}"
    if needs and texts:
        raise SettingConflictError(
            f"{needs} needs records, and a file is read as one text",
            got=f"{needs}, and {str(texts[0].path)!r}",
            fix="use a narrower data.path, data.format=jsonl, or data.text_key",
        )
    if config.text_key != DataConfig.text_key and len(texts) == len(files):
        raise SettingConflictError(
            "data.text_key has no effect in this run",
            got=f"data.text_key={config.text_key}, and every file of {config.path!r} "
            "is read as one text",
            fix="leave it out, or use data.format=jsonl",
        )


def list_files(path: str, format_setting: str = "auto") -> list[Unit]:
    """The text files of a path, sorted by relative path.

    Args:
      path: A file of any kind; a folder, in which all files at any depth with a suffix
        in ``TEXT_SUFFIXES`` or .parquet are taken, and folders of datasets; or a glob,
        in which ``**`` matches any depth.
        Folders and wildcards skip names that start with a dot; folders and ``**``
        follow no links to folders. A file with several names is taken once.
      format_setting: ``data.format``.

    Raises:
      DataNotFoundError: [T601] it does not exist, or cannot be read.
      DataFormatError: [T606] a suffix is that of another format.
      EmptyDataError: [T602] the folder has no text files.
    """
    try:
        root = Path(path).expanduser()
        if is_kernel_file(root):
            raise OSError(None, "the kernel generates it when it is read")
        if files := _files_at(root):
            return [
                replace(unit, format=_format(unit, format_setting)) for unit in files
            ]
        if root.is_dir():
            raise EmptyDataError(
                f"the folder {path!r} has no text files",
                got=f"no file with a suffix {', '.join(TEXT_SUFFIXES)}, or one of "
                f"these and {' or '.join(COMPRESSIONS)}, no .parquet "
                "file and no folder of datasets, at any depth",
                fix=f"use a glob for other files: data.path='{path}/**/*.html'",
            )
        got = _first_missing_part(root.absolute())
    # A name that is too long, an unreadable folder, ~ of a user who does not exist.
    except (OSError, RuntimeError) as error:
        got = getattr(error, "strerror", None) or str(error)
    raise DataNotFoundError(
        f"there is no data at {path!r}",
        got=got,
        fix="set data.path to a file, a folder or a glob that exists"
        + (f"; of the Hub it is data={path}" if HubName.find(path) else ""),
    )


def _format(unit: Unit, setting: str) -> str:
    if setting != "auto":
        return setting
    suffix = PurePath(decompressed_name(unit.name)).suffix
    if suffix in _REFUSED.split():
        raise not_text(unit, f"another format, by its suffix {suffix}")
    kind = _FORMATS.get(suffix, TEXT)
    if kind == PARQUET and unit.compression:
        raise not_text(unit, "a compressed table, by its suffixes")
    return kind


def _files_at(path: Path) -> list[Unit]:
    if path.is_dir():
        return list(_walk(path, _FOLDER_SUFFIXES))
    if path.exists():
        return [Unit(path.name, path)]
    is_glob = glob.has_magic(str(path)) and "\0" not in str(path)
    return _expand(path) if is_glob else []


def _walk(
    root: Path, suffixes: tuple[str, ...], skip: frozenset[str] = frozenset()
) -> Iterator[Unit]:
    paths: list[Path] = []
    for folder, subfolders, files in os.walk(root, onerror=_raise_unreadable):
        # site-packages alone can be a hundred times as large as the rest.
        subfolders[:] = [
            name
            for name in subfolders
            if name not in skip and name != "site-packages" and name[0] != "."
        ]
        _check_not_saved(folder, files)
        paths += [
            Path(folder, name)
            for name in files
            if decompressed_name(name).endswith(suffixes) and name[0] != "."
        ]
    return iter(_each_file_once(root, paths))


def _check_not_saved(folder: str, files: list[str]) -> None:
    """Refuse the folder of ``Dataset.save_to_disk``, whose texts would be left out."""
    if "dataset_dict.json" in files or {"state.json", "dataset_info.json"} <= {*files}:
        raise DataFormatError(
            "a folder of the data is one that datasets has saved",
            got=folder,
            fix="write each split to a file: "
            f"datasets.load_from_disk({folder!r}).to_parquet('train.parquet')",
        )


def _raise_unreadable(error: OSError) -> None:
    """Raise for a folder that ``os.walk`` would skip silently."""
    raise _unreadable(error) from error


def _unreadable(error: OSError) -> DataNotFoundError:
    return DataNotFoundError(
        "a folder of the data cannot be read",
        got=f"{error.filename}: {error.strerror}",
        fix="repair its permissions, or change data.path",
    )


def _expand(pattern: Path) -> list[Unit]:
    parts = pattern.parts
    fixed = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    root = Path(*parts[:fixed])
    matches = _matches(root, parts[fixed:])
    return _each_file_once(root, (path for path in matches if not path.is_dir()))


def _matches(folder: Path, parts: tuple[str, ...]) -> Iterator[Path]:
    """What a pattern matches below a folder, some of it perhaps several times.

    As ``glob.glob``, but ``**`` follows no links to folders, which may be loops.
    """
    first, rest = parts[0], parts[1:]
    if first == "**":
        if rest:
            yield from _matches(folder, rest)
        for entry in _entries(folder):
            if entry.is_dir(follow_symlinks=False):
                yield from _matches(Path(entry.path), parts)
            elif not rest:
                yield Path(entry.path)
        return
    if glob.has_magic(first):
        names = [entry.name for entry in _entries(folder, hidden=first[0] == ".")]
        paths = [folder / name for name in fnmatch.filter(names, first)]
    else:
        paths = [folder / first] if os.path.lexists(folder / first) else []
    for path in paths:
        if not rest:
            yield path
        elif path.is_dir():
            yield from _matches(path, rest)


def _entries(folder: Path, *, hidden: bool = False) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if hidden or entry.name[0] != "."]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _unreadable(error) from error


def _each_file_once(root: Path, paths: Iterable[Path]) -> list[Unit]:
    """The units of files, sorted by name.

    Of the names of one file, that one counts which has no link in it, else the first.
    So a link does not put a file into the other split as well.
    """
    names = dict[Hashable, list[tuple[str, Path]]]()
    for name, path in {
        path.relative_to(root).as_posix(): path for path in paths
    }.items():
        try:
            status = os.stat(path)
            identity: Hashable = status.st_dev, status.st_ino
        except OSError:  # reading it names the error
            identity = name
        names.setdefault(identity, []).append((name, path))
    real_root = os.path.realpath(root)

    def order(named: tuple[str, Path]) -> tuple[bool, str]:
        name, path = named
        return os.path.realpath(path) != os.path.join(real_root, name), name

    units = (Unit(*(min(of, key=order) if of[1:] else of[0])) for of in names.values())
    return sorted(units, key=lambda unit: unit.name)


def _first_missing_part(path: Path) -> str:
    if glob.has_magic(str(path)):
        return f"no file matches {path}"
    parent = next(parent for parent in path.parents if parent.exists())
    return f"{parent} has no {path.relative_to(parent).parts[0]!r}"
