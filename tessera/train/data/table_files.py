# SPDX-License-Identifier: Apache-2.0
"""Reads columns of Parquet files in batches.

``OSError`` without a number stands for a file that is not such a table. A page is
decompressed whole, and 60 KB may become 2 GiB: processes that read them have a limit of
memory, see ``preparation``.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tessera.errors import DataFormatError, TesseraError
from tessera.train.data.optional_libraries import import_extra

PARQUET: Final = "parquet"

# All may have the longest text of a dictionary, which Parquet stores once.
_BATCH_ROWS: Final = 16
_BUFFER_BYTES: Final = 2**20


def row_count(path: Path) -> int:
    """The number of rows of a file, from its footer."""
    with _parquet(path) as file:
        return file.metadata.num_rows


def row_group_ends(path: Path) -> list[tuple[int, int]]:
    """The row after each row group of a file, and the group's size in bytes."""
    with _parquet(path) as file:
        groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
        ends: list[tuple[int, int]] = []
        end = 0
        for group in groups:
            end += group.num_rows
            ends.append((end, group.total_byte_size))
        return ends


def column_names(path: Path) -> list[str]:
    """The names of the columns of a file."""
    with _parquet(path) as file:
        return file.schema_arrow.names


def read_columns(
    path: Path,
    keys: Sequence[str],
    begin: int,
    end: int | None,
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The rows of some columns in ``[begin, end)``: their numbers and values.

    Of the columns but the first, those that do not exist are left out. A value that is
    not UTF-8 is the ``UnicodeDecodeError``, and one that Python cannot have, a date in
    the year 10,000, another exception.

    Raises:
      KeyError: There is no such first column; has the names of the others.
    """
    for row, names, batch in _batches(path, keys, begin):
        if keys[0] not in names:
            raise KeyError(names)
        if end is not None and row >= end:
            return
        part = slice(max(begin - row, 0), None if end is None else end - row)
        columns = {key: batch.column(key)[part] for key in keys if key in names}
        rows = zip(*map(_values, columns.values()), strict=True)
        for number, values in enumerate(rows, row + part.start):
            yield number, dict(zip(columns, values, strict=True))


def _values(column: Any) -> Iterator[Any]:
    for scalar in column:
        try:
            yield scalar.as_py()
        except MemoryError:
            raise
        # Whatever a library of dates or decimals raises is about this value alone.
        except Exception as error:
            yield error


def _batches(
    path: Path, keys: Sequence[str], begin: int
) -> Iterator[tuple[int, list[str], Any]]:
    with _parquet(path) as file:
        names = file.schema_arrow.names
        columns = [key for key in keys if key in names]
        row = 0
        for number in range(file.num_row_groups):
            rows = file.metadata.row_group(number).num_rows
            if row + rows > begin or keys[0] not in names:
                # One group at a time, so that its rows have known numbers.
                for batch in file.iter_batches(
                    _BATCH_ROWS,
                    row_groups=[number],
                    columns=columns,
                    use_threads=False,
                ):
                    yield row, names, batch
                    row += len(batch)
            else:
                row += rows


@contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    parquet = import_extra("pyarrow.parquet", path.name, "data", DataFormatError)
    with (
        _errors(),
        # Pages are read one after another, not a whole column of a group.
        parquet.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file,
    ):
        yield file


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except (OSError, MemoryError, TesseraError):
        raise
    # Those of pyarrow, and what its parts of Python raise for values in the file.
    except Exception as error:
        raise OSError(str(error)) from error
