# SPDX-License-Identifier: Apache-2.0
"""The safetensors format: arrays by name in one file, behind a header in JSON.

    8 bytes      n, the size of the header, little endian
    n bytes      {"a.b": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}, …}
    the rest     the arrays, one after the other, without gaps

A file may come from anywhere, so the header is checked whole before any of the rest is
read, and nothing is allocated by what it says. Arrays are read in parts and written one
after the other: a device or a process takes its own share, and no copy of all is made.

Source: https://github.com/huggingface/safetensors, "Format".
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeAlias

import jax.numpy as jnp
import numpy as np

from tessera.errors import WeightFileError
from tessera.regular_files import check_regular

Index: TypeAlias = tuple[slice, ...]

DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
# What the reference implementation takes: far more than any model needs.
LARGEST_HEADER: Final = 100_000_000


@dataclass(frozen=True)
class Entry:
    """One array of a file.

    Attributes:
      dtype: Its dtype.
      shape: Its shape.
      begin: Where its bytes begin, counted from the end of the header.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int

    @property
    def end(self) -> int:
        """Where its bytes end."""
        return self.begin + math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class SafetensorsFile:
    """A file whose header has been checked; see ``open_file``.

    Attributes:
      path: The file.
      entries: Its arrays by name.
      data_begin: Where the header ends.
    """

    path: Path
    entries: Mapping[str, Entry]
    data_begin: int

    @cached_property
    def _bytes(self) -> np.memmap[Any, Any]:
        return np.memmap(self.path, np.uint8, "r", offset=self.data_begin)

    def read(self, name: str, index: Index = ()) -> np.ndarray:
        """A copy of an array, or of a part of it."""
        entry = self.entries[name]
        if entry.begin == entry.end:
            return np.empty(entry.shape, entry.dtype)[index]
        raw = self._bytes[entry.begin : entry.end]
        return np.array(raw.view(entry.dtype).reshape(entry.shape)[index])


def open_file(path: str | Path) -> SafetensorsFile:
    """Check a file's header.

    Raises:
      WeightFileError: [T805] it is malformed, or holds a dtype that is not known.
    """
    path = Path(path)
    try:
        check_regular(path)
        with path.open("rb") as file:
            total = os.fstat(file.fileno()).st_size
            size = int.from_bytes(file.read(8), "little")
            if total < 8 or size > min(LARGEST_HEADER, total - 8):
                raise ValueError(f"a header of {size:,} bytes in a file of {total:,}")
            text = file.read(size).decode("utf-8")
            read = json.loads(text, object_pairs_hook=_without_twins)
            entries = _entries(read, total - 8 - size)
    except OSError as error:
        raise _malformed(path, error.strerror or str(error)) from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _malformed(path, f"{error}" or type(error).__name__) from error
    return SafetensorsFile(path, entries, 8 + size)


def write_file(
    path: str | Path,
    forms: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]],
    read: Callable[[str], np.ndarray],
    metadata: Mapping[str, str] | None = None,
) -> int:
    """Write arrays, one after the other; after a crash the file is whole or not there.

    Args:
      path: The file; one that is there is replaced.
      forms: Dtype and shape of each array.
      read: Gives an array by its name, when its turn comes.
      metadata: Text to keep in the header.

    Returns:
      Bytes of the file.

    Raises:
      OSError: It cannot be written.
    """
    path = Path(path)
    # Wider dtypes first, as the reference implementation does: all are aligned.
    names = sorted(forms, key=lambda name: (-forms[name][0].itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    begin = 0
    for name in names:
        entry = Entry(*forms[name], begin)
        header[name] = {
            "dtype": _NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [begin, entry.end],
        }
        begin = entry.end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name in names:
                array = read(name)
                assert (array.dtype, array.shape) == forms[name], name
                file.write(np.ascontiguousarray(array).tobytes())
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return 8 + len(text) + begin


def _without_twins(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} is there twice")
        found[name] = value
    return found


def _entries(header: Any, size: int) -> dict[str, Entry]:
    """The arrays of a header, which fill the rest of the file without a gap."""
    if not isinstance(header, dict):
        raise ValueError("the header is no object")
    header.pop("__metadata__", None)
    entries: dict[str, Entry] = {}
    ends: dict[str, int] = {}
    for name, said in header.items():
        if said["dtype"] not in DTYPES:
            raise ValueError(f"{name!r} is of dtype {said['dtype']!r}")
        shape = tuple(_count(name, dim) for dim in said["shape"])
        begin, ends[name] = (_count(name, offset) for offset in said["data_offsets"])
        entries[name] = Entry(DTYPES[said["dtype"]], shape, begin)
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: ends[item[0]]):
        if entry.end != ends[name]:
            raise ValueError(
                f"{name!r} has offsets {entry.begin} to {ends[name]}, and its shape "
                f"takes {entry.end - entry.begin} bytes"
            )
        if entry.begin != position:
            raise ValueError(
                f"{name!r} begins at {entry.begin}, and the bytes before it end at "
                f"{position}"
            )
        position = entry.end
    if position != size:
        raise ValueError(f"the arrays take {position:,} bytes of {size:,}")
    return entries


def _count(name: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{name!r} says {value!r} where a size belongs")
    return value


def _malformed(path: Path, why: str) -> WeightFileError:
    return WeightFileError(
        f"{path} is no safetensors file that can be read",
        got=why,
        fix="write it again, and see that it was copied to its end",
    )
