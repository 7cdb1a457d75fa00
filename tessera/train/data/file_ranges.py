# SPDX-License-Identifier: Apache-2.0
"""Parts of data files that one worker reads by itself, and how files are cut.

A unit is a file or a range of it. Ranges of text and JSON lines are bytes of the
decompressed file and begin at the start of a line (of a character, if a text has no
line end nearby); ranges of tables are rows.
"""

import gzip
import hashlib
import io
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Final, cast

from tessera.errors import DataFormatError, DataNotFoundError
from tessera.train.data.optional_libraries import import_extra
from tessera.train.data.table_files import PARQUET, row_count, row_group_ends
from tessera.train.files.regular_files import check_regular

TEXT: Final = "text"
JSON_LINES: Final = "jsonl"
COMPRESSIONS: Final = (".gz", ".zst")

# A text file that is larger is read as several documents.
MOST_TEXT_BYTES: Final = 4 * 2**20
_UNIT_BYTES: Final = 16 * 2**20
_BUFFER_BYTES: Final = 2**20


@dataclass(frozen=True)
class Unit:
    """A file, or a range of it.

    Attributes:
      name: Its path relative to the corpus, with forward slashes.
      path: Its path on this machine.
      format: ``text``, ``jsonl`` or ``parquet``.
      begin: The first byte of the decompressed file, or the first row of a table.
      end: The end of the range, exclusive; None is the end of the file.
    """

    name: str
    path: Path
    format: str = TEXT
    begin: int = 0
    end: int | None = None

    @property
    def status(self) -> os.stat_result:
        """Size and times of the file.

        Raises:
          DataNotFoundError: [T601] the file does not exist.
        """
        with self.coded_errors():
            return os.stat(self.path)

    @property
    def identity(self) -> str:
        """Text that changes with the range, or when the file is written again.

        Whoever writes a file can set its time of modification, as ``rsync --times``
        does, but not the time of its last change, nor the inode of another file. To
        hash the content would take minutes for 100 GB, at each start.

        Raises:
          DataNotFoundError: [T601] the file does not exist.
        """
        where = f"{os.path.abspath(self.path)!r} {self.format} {self.begin} {self.end}"
        status = self.status
        times = f"{status.st_mtime_ns} {status.st_ctime_ns}"
        return f"{where} {status.st_size} {status.st_ino} {times}"

    @property
    def compression(self) -> str:
        """``.gz``, ``.zst`` or nothing."""
        suffix = self.path.suffix.lower()
        return suffix if suffix in COMPRESSIONS else ""

    @contextmanager
    def open(self, at: int = 0) -> Iterator[BinaryIO]:
        """The decompressed file from byte ``at`` on.

        Raises:
          DataNotFoundError: [T601] the file cannot be read, or is not a regular file:
            reading a pipe or a device might never end.
          DataFormatError: [T606] it cannot be decompressed, or the library for it is
            not installed.
        """
        with self.coded_errors():
            check_regular(self.path)
            with _decompressed(self.path, self.compression) as stream:
                if self.compression:
                    while at and (skipped := len(stream.read(min(at, _BUFFER_BYTES)))):
                        at -= skipped
                else:
                    stream.seek(at)
                yield stream

    @contextmanager
    def coded_errors(self) -> Iterator[None]:
        """Turn errors of the operating system and of decompression into coded ones."""
        try:
            yield
        except MemoryError as error:
            raise DataFormatError(
                f"the data file {self.name!r} takes too much memory",
                got=f"{self.path} takes more memory than there is",
                fix="write it again in smaller pages or batches, or uncompressed",
            ) from error
        except (OSError, EOFError, zlib.error) as error:
            # pyarrow raises OSError without a number.
            number = getattr(error, "errno", None)
            is_table = self.format == PARQUET
            if number is None and (self.compression or is_table):
                verb = f"read as {self.format}" if is_table else "decompressed"
                raise DataFormatError(
                    f"the data file {self.name!r} cannot be {verb}",
                    got=f"{self.path}: {' '.join(str(error).split())}",
                    fix="check that it was copied completely, or correct the suffix "
                    f"{self.path.suffix}",
                ) from error
            raise DataNotFoundError(
                f"the data file {self.name!r} cannot be read",
                got=f"{self.path}: {getattr(error, 'strerror', None) or error}",
                fix="repair the file or its permissions, or change data.path",
            ) from error

    def line_at(self, offset: int) -> int:
        """The number of the line that contains byte ``offset``, from 1."""
        lines = 1
        with self.open() as stream:
            while block := stream.read(min(offset, _BUFFER_BYTES)):
                lines += block.count(b"\n")
                offset -= len(block)
        return lines


def decompressed_name(name: str) -> str:
    """The name of a file without the suffix of its compression, in lower case."""
    name = name.lower()
    return name.removesuffix(".gz").removesuffix(".zst")


@contextmanager
def _decompressed(path: Path, compression: str) -> Iterator[BinaryIO]:
    if compression == ".gz":
        with gzip.open(path) as stream:
            yield cast(BinaryIO, stream)
    elif compression == ".zst":
        arrow = import_extra("pyarrow", path.name, "data", DataFormatError)
        with (
            arrow.OSFile(str(path)) as compressed,
            arrow.CompressedInputStream(compressed, "zstd") as raw,
            io.BufferedReader(raw, _BUFFER_BYTES) as stream,
        ):
            yield cast(BinaryIO, stream)
    else:
        with path.open("rb", buffering=_BUFFER_BYTES) as stream:
            yield stream


def split(units: Sequence[Unit], fraction: float) -> tuple[list[Unit], list[Unit]]:
    """Divide files into train and validation.

    A file goes to validation if a hash of its relative path, as a number from 0 to 1,
    is below ``fraction``: adding or removing other files does not move it. Each split
    gets at least one file. A single file is cut instead: its last part is the
    validation text, from the start of a line or row.

    Args:
      units: Whole files, at least one.
      fraction: The expected share of validation files; 0 is no validation, and 1 is
        no training.

    Example:
      >>> names = [Unit(f"{i}.txt", Path()) for i in range(5)]
      >>> [[unit.name for unit in side] for side in split(names, 0.2)]
      [['0.txt', '2.txt', '3.txt', '4.txt'], ['1.txt']]
    """
    if not fraction:
        return list(units), []
    if fraction == 1:
        return [], list(units)
    if len(units) == 1:
        cut = _cut(units[0], fraction)
        return [replace(units[0], end=cut)], [replace(units[0], begin=cut)]
    ranked = sorted(units, key=_rank)
    below = sum(_rank(unit) < fraction for unit in ranked)
    chosen = set(ranked[: min(max(below, 1), len(ranked) - 1)])
    train = [unit for unit in units if unit not in chosen]
    return train, [unit for unit in units if unit in chosen]


def _rank(unit: Unit) -> float:
    digest = hashlib.blake2b(os.fsencode(unit.name), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _cut(unit: Unit, fraction: float) -> int:
    size = _size(unit)
    cut = int(size * (1 - fraction))
    if unit.format == PARQUET:
        return max(min(cut, size - 1), min(1, size))
    if unit.format == JSON_LINES:
        return _line_after(unit, cut)
    # At least half of the validation text is left.
    return _text_boundary(unit, cut, (size - cut) // 2)


def _size(unit: Unit) -> int:
    """Bytes of the decompressed file, or rows of a table."""
    if unit.format == PARQUET:
        with unit.coded_errors():
            check_regular(unit.path)
            return row_count(unit.path)
    with unit.open() as stream:
        if not unit.compression:
            return stream.seek(0, os.SEEK_END)
        return sum(map(len, iter(lambda: stream.read(_BUFFER_BYTES), b"")))


def _line_after(unit: Unit, offset: int) -> int:
    """Where the first line after ``offset`` begins, or else the last line.

    Lines are those with records. If there is one, it is the end of the file.
    """
    with unit.open(offset) as stream:
        lines = line_sizes(stream)
        position = offset + next(lines, (0, False))[0]
        for size, has_record in lines:
            if has_record:
                return position
            position += size
    last = position = 0
    with unit.open() as stream:
        for size, has_record in line_sizes(stream):
            last = position if has_record else last
            position += size
    return last or position


def line_sizes(stream: BinaryIO) -> Iterator[tuple[int, bool]]:
    """The size of each line, and whether it is not blank, whatever its length."""
    size, has_record = 0, False
    while piece := stream.readline(_BUFFER_BYTES):
        size += len(piece)
        has_record = has_record or bool(piece.strip())
        if piece.endswith(b"\n"):
            yield size, has_record
            size, has_record = 0, False
    if size:
        yield size, has_record


def _text_boundary(unit: Unit, offset: int, near: int) -> int:
    """The start of a line in the ``near`` bytes after ``offset``, or of a character."""
    with unit.open(offset) as stream:
        line = stream.readline(min(near, MOST_TEXT_BYTES))
        rest = stream.read(4)
    if line.endswith(b"\n"):
        return offset + len(line)
    # Bytes at the start that continue a character of UTF-8.
    first = (line + rest)[:4]
    starts = (i for i, byte in enumerate(first) if byte & 0xC0 != 0x80)
    return offset + next(starts, len(first))


def divide(unit: Unit, unit_bytes: int = _UNIT_BYTES) -> list[Unit]:
    """Cut a unit into smaller ones that can be read in parallel.

    Compressed files stay whole: a reader has to go through all that comes before.
    """
    if unit.compression:
        return [unit]
    find_cuts = _group_cuts if unit.format == PARQUET else _byte_cuts
    cuts = [unit.begin, *find_cuts(unit, unit_bytes)]
    ends = [*cuts[1:], unit.end]
    return [replace(unit, begin=a, end=b) for a, b in zip(cuts, ends, strict=True)]


def _group_cuts(unit: Unit, unit_bytes: int) -> list[int]:
    """Rows at the ends of row groups."""
    with unit.coded_errors():
        check_regular(unit.path)
        groups = row_group_ends(unit.path)
    cuts: list[int] = []
    size = 0
    for end, group_bytes in groups[:-1]:
        size += group_bytes
        if size >= unit_bytes and unit.begin < end < (unit.end or groups[-1][0]):
            cuts.append(end)
            size = 0
    return cuts


def _byte_cuts(unit: Unit, unit_bytes: int) -> list[int]:
    end = _size(unit) if unit.end is None else unit.end
    cuts = [unit.begin]
    while cuts[-1] + unit_bytes < end:
        cut = cuts[-1] + unit_bytes
        if unit.format == JSON_LINES:
            with unit.open(cut) as stream:
                cut += next(line_sizes(stream), (0, False))[0]
        else:
            cut = _text_boundary(unit, cut, unit_bytes)
        if cut >= end:
            break
        cuts.append(cut)
    return cuts[1:]
