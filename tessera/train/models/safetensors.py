# SPDX-License-Identifier: Apache-2.0
"""Safetensors files: opened by the library with coded errors, written array by array.

The library checks the header. It lacks three things that are done here. It takes the
last of two entries with one name, so names are checked for duplicates. It copies what
it reads, while a mapped array can be transposed before a slice of it is copied. And it
writes arrays that are all in memory at the same time, while a large
checkpoint is exported one array at a time; the format makes that simple:

    8 bytes      n, the size of the header, little endian
    n bytes      {"a.b": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}, …}
    the rest     the arrays, one after the other, without gaps

Source: https://github.com/huggingface/safetensors, "Format".
"""

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors import SafetensorError, safe_open

from tessera.errors import WeightFileError
from tessera.foundations.dtypes import DTYPES
from tessera.train.files.regular_files import check_regular
from tessera.train.files.untrusted_json import parse_json

_FORMAT_NAMES: Final[Mapping[np.dtype[Any], str]] = {
    **{DTYPES[f"f{bits}"]: f"F{bits}" for bits in (16, 32, 64)},
    **{DTYPES[f"i{bits}"]: f"I{bits}" for bits in (8, 16, 32, 64)},
    DTYPES["bf16"]: "BF16",
    DTYPES["u8"]: "U8",
    DTYPES["bool"]: "BOOL",
}
_DTYPES: Final = {name: dtype for dtype, name in _FORMAT_NAMES.items()}
# The library's own limit: far more than any model needs.
_MAX_HEADER: Final = 100_000_000


class SafetensorsFile:
    """The arrays of a safetensors file, by name; made only if its header is sound.

    Args:
      path: The file.

    Raises:
      WeightFileError: [T805] it is malformed, truncated, or cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            check_regular(self.path)
            with safe_open(self.path, "numpy") as sound, self.path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = parse_json(file.read(size), longest=_MAX_HEADER)
                names = sound.keys()
            # Its pages are read when a slice is copied, and can be dropped again.
            self._bytes = np.memmap(self.path, np.uint8, mode="r", offset=0)
        except (OSError, ValueError, SafetensorError) as error:
            raise _malformed(self.path, error) from error
        self._begins = {
            name: 8 + size + header[name]["data_offsets"][0] for name in names
        }
        self.arrays: Mapping[str, tuple[str, tuple[int, ...]]] = {
            name: (header[name]["dtype"], tuple(header[name]["shape"]))
            for name in names
        }
        """Each array's dtype, in the format's names (``BF16``), and its shape."""
        self.problems: tuple[str, ...] = ()

    def view(self, name: str) -> np.ndarray:
        """An array, mapped: only what is copied from it is read."""
        format_name, shape = self.arrays[name]
        dtype = _DTYPES[format_name]
        begin = self._begins[name]
        data = self._bytes[begin : begin + math.prod(shape) * dtype.itemsize]
        return data.view(np.ndarray).view(dtype).reshape(shape)


def write_file(
    path: str | Path,
    layouts: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]],
    read: Callable[[str], np.ndarray],
    metadata: Mapping[str, str] | None = None,
) -> int:
    """Write arrays one by one; after a crash, the file is either whole or absent.

    Args:
      path: The file; an existing one is replaced.
      layouts: Shape of each array, and the dtype that it is written in; those of one
        size of dtype are read in this order.
      read: Returns an array by name, when it is about to be written.
      metadata: Text for the header.

    Returns:
      Bytes of the file.

    Raises:
      OSError: It cannot be written.
    """
    path = Path(path)
    # Wider dtypes first, as the library does: all arrays are then aligned.
    names = sorted(layouts, key=lambda name: -layouts[name][0].itemsize)
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in names:
        dtype, shape = layouts[name]
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": _FORMAT_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name in names:
                array, (dtype, shape) = read(name), layouts[name]
                assert array.shape == shape, name
                file.write(array.astype(dtype, copy=False).tobytes())
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return 8 + len(text) + end


def _malformed(path: Path, error: Exception) -> WeightFileError:
    why = getattr(error, "strerror", None) or f"{error}" or type(error).__name__
    return WeightFileError(
        f"{path} is not a readable safetensors file",
        got=why.splitlines()[0],
        fix="write it again, and check that it was copied completely",
    )
