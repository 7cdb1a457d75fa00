# SPDX-License-Identifier: Apache-2.0
"""The sizes of the pages of a Parquet column, before a page is read.

A reader holds a page whole, and a page may decompress to 2 GiB. pyarrow does not show
the headers of pages: structs in Thrift's compact protocol, in front of each page. See
https://github.com/apache/parquet-format, ``PageHeader``, and
https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md.
"""

from collections.abc import Iterator
from typing import Any, BinaryIO, Final, NamedTuple

# Statistics in a header may have two values of the column.
_HEADER_BYTES: Final = (2**10, 2**15, 2**20)
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 12
_INTEGERS: Final = (4, 5, 6)


class Page(NamedTuple):
    """The uncompressed size of a page, its values, and whether it is a dictionary."""

    size: int
    values: int
    is_dictionary: bool


def read_pages(file: BinaryIO, begin: int, end: int) -> Iterator[Page]:
    """The pages of a column chunk in ``[begin, end)``, by their headers.

    It ends early at what is no header: the library that reads the page says so.
    """
    while begin < end:
        fields, length = _read_header(file, begin)
        if 2 not in fields or fields.get(3, -1) < 0:
            return
        values = [fields[i].get(1, 0) for i in (5, 7, 8) if i in fields]
        yield Page(fields[2], sum(values), 7 in fields)
        begin += length + fields[3]


def _read_header(file: BinaryIO, at: int) -> tuple[dict[int, Any], int]:
    for size in _HEADER_BYTES:
        file.seek(at)
        try:
            return _read_struct(file.read(size), 0)
        except IndexError:
            continue  # it is longer
        except (ValueError, RecursionError):
            break
    return {}, 0


def _read_struct(content: bytes, at: int) -> tuple[dict[int, Any], int]:
    """The integers and structs of a struct by their numbers, and where it ends."""
    values = dict[int, Any]()
    number = 0
    while head := content[at]:
        at += 1
        if head >> 4:
            number += head >> 4
        else:
            number, at = _read_integer(content, at)
        kind = head & 15
        if kind in _INTEGERS:
            values[number], at = _read_integer(content, at)
        elif kind == _STRUCT:
            values[number], at = _read_struct(content, at)
        elif kind not in (_TRUE, _FALSE):  # which are their own value
            at = _skip(content, at, kind)
    return values, at + 1


def _skip(content: bytes, at: int, kind: int) -> int:
    """Where a value ends; no header of a page has a map."""
    if kind == _STRUCT:
        return _read_struct(content, at)[1]
    if kind == _BINARY:
        size, at = _read_varint(content, at)
        return at + size
    if kind in (_LIST, _SET):
        head, at = content[at], at + 1
        count = head >> 4
        if count == 15:
            count, at = _read_varint(content, at)
        for _ in range(count):
            at = _skip(content, at, head & 15)
        return at
    if kind in (_TRUE, _FALSE, _BYTE):  # here of a list, where each is a byte
        return at + 1
    return at + 8 if kind == _DOUBLE else _read_varint(content, at)[1]


def _read_integer(content: bytes, at: int) -> tuple[int, int]:
    value, at = _read_varint(content, at)
    return (value >> 1) ^ -(value & 1), at


def _read_varint(content: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:
        byte = content[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at
    raise ValueError("more than 64 bits")
