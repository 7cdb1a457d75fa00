# SPDX-License-Identifier: Apache-2.0
"""Finds the text files of a corpus, and splits them into train and validation.

A document is one file, identified by its path relative to the corpus. Order and split
depend only on those relative paths, so every machine and process with the same files
has the same documents in the same split.
"""

import glob
import gzip
import hashlib
import os
import sys
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tessera.errors import DataFormatError, DataNotFoundError, EmptyDataError
from tessera.regular_files import check_regular, is_kernel_file

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl", ".ndjson")

# Generated tables, then packages that some distributions install separately: with
# them the corpus would differ between machines with the same Python.
_STDLIB_EXCLUDED = frozenset({"encodings", "pydoc_data"}) | frozenset(
    {"distutils", "ensurepip", "idlelib", "lib2to3", "tkinter", "turtledemo", "venv"}
)
_TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})


@dataclass(frozen=True)
class Document:
    """One file, or a part of it.

    Attributes:
      name: Its path relative to the corpus, with forward slashes.
      path: Its path on this machine.
      begin: Offset of the document in the decompressed file.
      end: Offset of its end; None is the end of the file.
      first_line: The number of the line at ``begin``.
    """

    name: str
    path: Path
    begin: int = 0
    end: int | None = None
    first_line: int = 1

    def read(self) -> bytes:
        """The document's bytes; files with the suffix ``.gz`` are decompressed.

        Raises:
          DataNotFoundError: [T601] the file cannot be read, or is not a regular file:
            reading a pipe or a device might never end.
          DataFormatError: [T606] its suffix is ``.gz`` and it is not gzip.
        """
        try:
            check_regular(self.path)
            content = self.path.read_bytes()
            if self.path.suffix.lower() == ".gz":
                content = gzip.decompress(content)
            return content[self.begin : self.end]
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DataFormatError(
                f"the data file {self.name!r} cannot be decompressed",
                got=f"{self.path}: {error}",
                fix="check that it was copied completely, or remove the suffix .gz",
            ) from error
        except OSError as error:
            raise DataNotFoundError(
                f"the data file {self.name!r} cannot be read",
                got=f"{self.path}: {error.strerror}",
                fix="repair the file or its permissions, or change data.path",
            ) from error


def list_stdlib() -> list[Document]:
    """The modules of this Python's standard library that are written in Python.

    Excluded are tests, generated tables, and packages that some distributions install
    separately (see ``docs/guides/data.md``).

    Raises:
      EmptyDataError: [T602] this Python has no source text installed.

    Example:
      >>> "asyncio/events.py" in {document.name for document in list_stdlib()}
      True
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    included = sys.stdlib_module_names - _STDLIB_EXCLUDED
    documents = [
        document
        for document in _walk(root, (".py",), skip=_TEST_FOLDERS)
        if document.name.split("/")[0].removesuffix(".py") in included
    ]
    if not documents:
        raise EmptyDataError(
            "this Python has no source text of its standard library",
            got=f"no .py files of the standard library in {root}",
            fix="use data=text data.path=<a file, a folder or a glob>",
        )
    return documents


def list_files(path: str) -> list[Document]:
    """The text files of a path, sorted by relative path.

    Args:
      path: A file of any kind; a folder, in which all files at any depth with a suffix
        in ``TEXT_SUFFIXES`` are taken; or a glob, in which ``**`` matches any depth.
        Folders and wildcards skip names that start with a dot.

    Raises:
      DataNotFoundError: [T601] it does not exist, or cannot be read.
      EmptyDataError: [T602] the folder has no text files.
    """
    try:
        root = Path(path).expanduser()
        if is_kernel_file(root):
            raise OSError(None, "the kernel generates it when it is read")
        if documents := _documents_at(root):
            return documents
        if root.is_dir():
            raise EmptyDataError(
                f"the folder {path!r} has no text files",
                got=f"no file with a suffix {', '.join(TEXT_SUFFIXES)}, or one of "
                "these and .gz, at any depth",
                fix=f"use a glob for other files: data.path='{path}/**/*.html'",
            )
        got = _first_missing_part(root.absolute())
    # A name that is too long, an unreadable folder, ~ of a user who does not exist.
    except (OSError, RuntimeError) as error:
        got = getattr(error, "strerror", None) or str(error)
    raise DataNotFoundError(
        f"there is no data at {path!r}",
        got=got,
        fix="set data.path to a file, a folder or a glob that exists",
    )


def _documents_at(path: Path) -> list[Document]:
    if path.is_dir():
        return list(_walk(path, TEXT_SUFFIXES))
    if path.exists():
        return [Document(path.name, path)]
    is_glob = glob.has_magic(str(path)) and "\0" not in str(path)
    return _expand(path) if is_glob else []


def _walk(
    root: Path, suffixes: tuple[str, ...], skip: frozenset[str] = frozenset()
) -> Iterator[Document]:
    paths: list[Path] = []
    for folder, subfolders, files in os.walk(root, onerror=_raise_unreadable):
        # site-packages alone can be a hundred times as large as the rest.
        subfolders[:] = [
            name
            for name in subfolders
            if name not in skip and name != "site-packages" and name[0] != "."
        ]
        paths += [
            Path(folder, name)
            for name in files
            if name.removesuffix(".gz").endswith(suffixes) and name[0] != "."
        ]
    named = {path.relative_to(root).as_posix(): path for path in paths}
    return (Document(name, named[name]) for name in sorted(named))


def _raise_unreadable(error: OSError) -> None:
    """Raise for a folder that ``os.walk`` would skip silently."""
    raise DataNotFoundError(
        "a folder of the data cannot be read",
        got=f"{error.filename}: {error.strerror}",
        fix="repair its permissions, or change data.path",
    ) from error


def _expand(pattern: Path) -> list[Document]:
    parts = pattern.parts
    fixed = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    root = Path(*parts[:fixed])
    matches = map(Path, glob.glob(str(pattern), recursive=True))
    named = {p.relative_to(root).as_posix(): p for p in matches if not p.is_dir()}
    return [Document(name, named[name]) for name in sorted(named)]


def _first_missing_part(path: Path) -> str:
    if glob.has_magic(str(path)):
        return f"no file matches {path}"
    parent = next(parent for parent in path.parents if parent.exists())
    return f"{parent} has no {path.relative_to(parent).parts[0]!r}"


def split(
    documents: Sequence[Document], fraction: float, *, by_lines: bool = False
) -> tuple[list[Document], list[Document]]:
    """Divide documents into train and validation, by file.

    A file goes to validation if a hash of its relative path, as a number from 0 to 1,
    is below ``fraction``: adding or removing other files does not move it. Each split
    gets at least one file. A single file is cut instead: its last part is the
    validation text, from the start of a line if one is near.

    Args:
      documents: At least one.
      fraction: The expected share of validation files; 0 is no validation.
      by_lines: Whether to cut a single file only between lines.

    Example:
      >>> names = [Document(f"{i}.txt", Path()) for i in range(5)]
      >>> [[d.name for d in side] for side in split(names, 0.2)]
      [['0.txt', '2.txt', '3.txt', '4.txt'], ['1.txt']]
    """
    if not fraction:
        return list(documents), []
    if len(documents) == 1:
        return _cut(documents[0], fraction, by_lines)
    ranked = sorted(documents, key=_rank)
    below = sum(_rank(document) < fraction for document in ranked)
    chosen = set(ranked[: min(max(below, 1), len(ranked) - 1)])
    train = [document for document in documents if document not in chosen]
    return train, [document for document in documents if document in chosen]


def _rank(document: Document) -> float:
    digest = hashlib.blake2b(os.fsencode(document.name), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _cut(
    document: Document, fraction: float, by_lines: bool
) -> tuple[list[Document], list[Document]]:
    content = document.read()
    cut = int(len(content) * (1 - fraction))
    if by_lines:
        last_line = content.rfind(b"\n", 0, len(content.rstrip())) + 1
        cut = min(content.find(b"\n", cut) + 1 or last_line, last_line) or len(content)
    # Near means that at least half of the validation text is left.
    elif line := content.find(b"\n", cut, (cut + len(content)) // 2) + 1:
        cut = line
    else:
        # Do not cut a UTF-8 character.
        while cut < len(content) and content[cut] & 0xC0 == 0x80:
            cut += 1
    number = document.first_line + content.count(b"\n", 0, cut)
    tail = replace(document, begin=cut, first_line=number)
    return [replace(document, end=cut)], [tail]
