# SPDX-License-Identifier: Apache-2.0
"""The sizes of compressed record batches in Arrow files, before a batch is read.

A reader decompresses a batch whole, and 60 KB may become 2 GiB. pyarrow does not show
the messages of a file: tables of FlatBuffers, in front of each batch. See
https://github.com/apache/arrow/tree/main/format, ``Message.fbs`` and ``File.fbs``, and
https://flatbuffers.dev/internals.
"""

import struct
from collections.abc import Iterator
from typing import BinaryIO, Final

MAGIC: Final = b"ARROW1"
_CONTINUATION: Final = 0xFFFFFFFF
_DICTIONARY, _BATCH = 2, 3
# Of a batch with thousands of columns.
_LONGEST: Final = 2**24


def batch_sizes(file: BinaryIO) -> Iterator[int]:
    """The decompressed size of each compressed batch and dictionary of a file.

    It ends early at what is no message: the library that reads it says so.
    """
    try:
        is_file = file.read(len(MAGIC)) == MAGIC
        yield from _of_file(file) if is_file else _of_stream(file)
    except (struct.error, IndexError, OverflowError, ValueError):
        return


def _of_stream(file: BinaryIO) -> Iterator[int]:
    at, end = 0, file.seek(0, 2)
    while at < end:
        size, at = yield from _message(file, at)
        at += size


def _of_file(file: BinaryIO) -> Iterator[int]:
    """Of the batches that the footer lists, in whichever order they stand."""
    tail = len(MAGIC) + 4
    at = file.seek(max(file.seek(0, 2) - tail, 0))
    (size,) = struct.unpack("<I", file.read(4))
    file.seek(max(at - size, 0))
    content = file.read(size)
    footer = _Table(content, *struct.unpack_from("<I", content))
    for number in (2, 3):
        for block in footer.vector(number, "<qi4xq"):
            yield from _message(file, block[0])


def _message(file: BinaryIO, at: int) -> Iterator[int]:
    """The size of a batch, if it is compressed; returns its body's, and where."""
    file.seek(at)
    length, begin = *struct.unpack("<I", file.read(4)), at + 4
    if length == _CONTINUATION:  # which is not in files of before 2019
        length, begin = *struct.unpack("<I", file.read(4)), at + 8
    if not 0 < length <= _LONGEST:
        raise IndexError
    content = file.read(length)
    message = _Table(content, *struct.unpack_from("<I", content))
    kind, body = message.number(1, "<B"), message.number(3, "<q")
    begin += length
    batch = message.table(2) if kind in (_DICTIONARY, _BATCH) else None
    if batch is not None and kind == _DICTIONARY:
        batch = batch.table(1)
    if batch is not None and batch.table(3) is not None:
        yield sum(
            _decompressed(file, begin + offset)
            for offset, size in batch.vector(2, "<qq")
            if size > 8
        )
    if body < 0:
        raise IndexError
    return body, begin


def _decompressed(file: BinaryIO, at: int) -> int:
    file.seek(at)
    (size,) = struct.unpack("<q", file.read(8))
    return max(size, 0)  # -1: this buffer is not compressed


class _Table:
    """A table of FlatBuffers, whose fields are found by their numbers."""

    def __init__(self, content: bytes, at: int) -> None:
        self._content, self._at = content, at

    def number(self, field: int, form: str) -> int:
        at = self._field(field)
        return 0 if at is None else struct.unpack_from(form, self._content, at)[0]

    def table(self, field: int) -> "_Table | None":
        at = self._field(field)
        return None if at is None else _Table(self._content, self._target(at))

    def vector(self, field: int, form: str) -> Iterator[tuple[int, ...]]:
        if (at := self._field(field)) is None:
            return
        begin = self._target(at)
        (count,) = struct.unpack_from("<I", self._content, begin)
        for number in range(count):
            begin_of = begin + 4 + number * struct.calcsize(form)
            yield struct.unpack_from(form, self._content, begin_of)

    def _target(self, at: int) -> int:
        return at + struct.unpack_from("<I", self._content, at)[0]

    def _field(self, field: int) -> int | None:
        offset = struct.unpack_from("<i", self._content, self._at)[0]
        vtable = self._at - offset
        entry = 4 + 2 * field
        if vtable < 0 or entry >= struct.unpack_from("<H", self._content, vtable)[0]:
            return None
        (offset,) = struct.unpack_from("<H", self._content, vtable + entry)
        return self._at + offset if offset else None
