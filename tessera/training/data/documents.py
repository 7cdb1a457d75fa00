# SPDX-License-Identifier: Apache-2.0
"""Where text comes from: files on this machine, split into train and validation.

A document is one file, known by its path relative to the corpus. Order and split
depend on those relative paths alone, so that every machine and every process with the
same files sees the same documents in the same split.
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
from tessera.regular_files import check_regular, is_made_by_the_kernel

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl", ".ndjson")

# Tables that a program wrote, then packages that some distributions install apart:
# with them the corpus would differ between machines with the same Python.
_STDLIB_LEFT_OUT = frozenset({"encodings", "pydoc_data"}) | frozenset(
    {"distutils", "ensurepip", "idlelib", "lib2to3", "tkinter", "turtledemo", "venv"}
)
_TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})


@dataclass(frozen=True)
class Document:
    """One file, or one part of it.

    Attributes:
      name: Its path relative to the corpus, with forward slashes.
      path: Where it is.
      begin: The first of its bytes that belongs to the document, decompressed.
      end: The first after it that does not; None where the file ends.
      first_line: The number of the line that is at ``begin``.
    """

    name: str
    path: Path
    begin: int = 0
    end: int | None = None
    first_line: int = 1

    def read(self) -> bytes:
        """The document's bytes; those of a file that ends in ``.gz`` decompressed.

        Raises:
          DataNotFoundError: [T601] the file cannot be opened or read, or is none: a
            pipe might be waited for and a device read for ever.
          DataFormatError: [T606] it ends in ``.gz`` and is not gzip.
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
                fix="see that it was copied to its end, or leave out the ending .gz",
            ) from error
        except OSError as error:
            raise DataNotFoundError(
                f"the data file {self.name!r} cannot be read",
                got=f"{self.path}: {error.strerror}",
                fix="mend the file or its permissions, or point data.path elsewhere",
            ) from error


def list_stdlib() -> list[Document]:
    """The modules of this Python's standard library that are written in Python.

    Left out: tests, tables written by programs, and the packages that some
    distributions install apart (see ``docs/guides/data.md``).

    Raises:
      EmptyDataError: [T602] this Python keeps no source text.

    Example:
      >>> "asyncio/events.py" in {document.name for document in list_stdlib()}
      True
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    wanted = sys.stdlib_module_names - _STDLIB_LEFT_OUT
    documents = [
        document
        for document in _walk(root, (".py",), skip=_TEST_FOLDERS)
        if document.name.split("/")[0].removesuffix(".py") in wanted
    ]
    if not documents:
        raise EmptyDataError(
            "this Python has no source text of its standard library",
            got=f"no .py files of the standard library in {root}",
            fix="use data=text data.path=<a file, a folder or a glob>",
        )
    return documents


def list_files(path: str) -> list[Document]:
    """The text files that ``path`` names, sorted by relative path.

    Args:
      path: A file of any kind; a folder, of which every file below with a suffix of
        ``TEXT_SUFFIXES`` is taken; or a glob, of which every file is taken and in
        which ``**`` means any depth. Names that begin with a dot are passed over in
        folders, and by a glob's wildcards.

    Raises:
      DataNotFoundError: [T601] nothing is there, or it cannot be looked at.
      EmptyDataError: [T602] the folder holds no text files.
    """
    try:
        place = Path(path).expanduser()
        if is_made_by_the_kernel(place):
            raise OSError(None, "the kernel makes it up as it is read")
        if documents := _found_at(place):
            return documents
        if place.is_dir():
            raise EmptyDataError(
                f"the folder {path!r} holds no text files",
                got=f"no file ending in {', '.join(TEXT_SUFFIXES)}, or in one of these "
                "and .gz, at any depth",
                fix=f"for other files give a glob: data.path='{path}/**/*.html'",
            )
        got = _last_that_exists(place.absolute())
    # A name that is too long, a folder without leave, ~ of a user who is none.
    except (OSError, RuntimeError) as error:
        got = getattr(error, "strerror", None) or str(error)
    raise DataNotFoundError(
        f"there is no data at {path!r}",
        got=got,
        fix="give data.path a file, a folder or a glob that exists",
    )


def _found_at(place: Path) -> list[Document]:
    if place.is_dir():
        return list(_walk(place, TEXT_SUFFIXES))
    if place.exists():
        return [Document(place.name, place)]
    is_glob = glob.has_magic(str(place)) and "\0" not in str(place)
    return _expand(place) if is_glob else []


def _walk(
    root: Path, suffixes: tuple[str, ...], skip: frozenset[str] = frozenset()
) -> Iterator[Document]:
    found: list[Path] = []
    for folder, subfolders, files in os.walk(root, onerror=_refuse_folder):
        # site-packages alone can be a hundred times the size of what is looked for.
        subfolders[:] = [
            name
            for name in subfolders
            if name not in skip and name != "site-packages" and name[0] != "."
        ]
        found += [
            Path(folder, name)
            for name in files
            if name.removesuffix(".gz").endswith(suffixes) and name[0] != "."
        ]
    named = {path.relative_to(root).as_posix(): path for path in found}
    return (Document(name, named[name]) for name in sorted(named))


def _refuse_folder(error: OSError) -> None:
    """Raise, where ``os.walk`` would leave a folder out without a word."""
    raise DataNotFoundError(
        "a folder of the data cannot be read",
        got=f"{error.filename}: {error.strerror}",
        fix="mend its permissions, or point data.path elsewhere",
    ) from error


def _expand(pattern: Path) -> list[Document]:
    parts = pattern.parts
    fixed = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    root = Path(*parts[:fixed])
    matches = map(Path, glob.glob(str(pattern), recursive=True))
    named = {p.relative_to(root).as_posix(): p for p in matches if not p.is_dir()}
    return [Document(name, named[name]) for name in sorted(named)]


def _last_that_exists(path: Path) -> str:
    if glob.has_magic(str(path)):
        return f"no file matches {path}"
    parent = next(parent for parent in path.parents if parent.exists())
    return f"{parent} has no {path.relative_to(parent).parts[0]!r}"


def split(
    documents: Sequence[Document], fraction: float, *, by_lines: bool = False
) -> tuple[list[Document], list[Document]]:
    """Divide documents into train and validation, by file.

    A file goes to validation when a hash of its relative path, as a number from 0 to
    1, is below ``fraction``: a file that is there stays on its side when others come
    or go. Each side gets at least one file. A single file is cut instead: its last
    part, from a line's beginning on where one is near, is the validation text.

    Args:
      documents: At least one.
      fraction: The expected share of validation files; 0 keeps none.
      by_lines: Whether a single file is cut at a line's beginning, wherever that is.

    Example:
      >>> names = [Document(f"{i}.txt", Path()) for i in range(5)]
      >>> [[d.name for d in side] for side in split(names, 0.2)]
      [['0.txt', '2.txt', '3.txt', '4.txt'], ['1.txt']]
    """
    if not fraction:
        return list(documents), []
    if len(documents) == 1:
        return _cut(documents[0], fraction, by_lines)
    ranked = sorted(documents, key=_place)
    below = sum(_place(document) < fraction for document in ranked)
    chosen = set(ranked[: min(max(below, 1), len(ranked) - 1)])
    train = [document for document in documents if document not in chosen]
    return train, [document for document in documents if document in chosen]


def _place(document: Document) -> float:
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
    # Near: at least half of the validation text stays.
    elif line := content.find(b"\n", cut, (cut + len(content)) // 2) + 1:
        cut = line
    else:
        # Not inside a UTF-8 character.
        while cut < len(content) and content[cut] & 0xC0 == 0x80:
            cut += 1
    number = document.first_line + content.count(b"\n", 0, cut)
    tail = replace(document, begin=cut, first_line=number)
    return [replace(document, end=cut)], [tail]
