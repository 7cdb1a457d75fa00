# SPDX-License-Identifier: Apache-2.0
"""Blocks of tokens in files: written once, read row by row.

A block is a folder of shards, and a shard is up to three arrays in NumPy's format:

    00000.tokens.npy      uint16 or uint32, [tokens]
    00000.starts.npy      int64, [documents]
    00000.loss_mask.npy   bool, [tokens]; only if there are masks
    00001.tokens.npy      …
    manifest.json         what is in each shard; sizes and checksums of its files

A block is written under a temporary name and renamed when it is complete. Its manifest
and the sizes of its files are checked when a run starts, and the checksum of a shard's
files when a process first reads a row of it: a damaged file is never trained on. Files
are not memory-mapped, as one that becomes shorter would then end the process.
"""

import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from tessera.errors import TokenCacheError
from tessera.train.data.packing import ShardBuilder, TokenArrays, checksum, token_range
from tessera.train.data.tokenization import Ids

FORMAT: Final = 4
"""Changes when the same text would give other files."""

# Tokens of a shard, and the shards whose files and starts a process keeps.
_SHARD_TOKENS: Final = 2**22
_MOST_OPEN: Final = 48
_MANIFEST: Final = "manifest.json"
_READ_BYTES: Final = 2**20


@dataclass(frozen=True, eq=False)
class StoredShard:
    """A shard in the folder of a block.

    Attributes:
      prefix: The common part of its paths: ``<block>/00000``.
      num_tokens: Tokens, separators included.
      num_documents: Documents that are not empty.
      num_bytes: Size of the text.
      largest_id: The largest of the tokens; 0 if there are none.
      files: Size and checksum of the file of each array.
    """

    prefix: Path
    num_tokens: int
    num_documents: int
    num_bytes: int
    largest_id: int
    files: dict[str, tuple[int, str]]
    _verified: list[bool] = field(default_factory=list)

    @property
    def fingerprint(self) -> str:
        """Changes with the content of the arrays."""
        return repr(sorted((name, value) for name, (_, value) in self.files.items()))

    def read(self, begin: int, end: int) -> TokenArrays:
        """The tokens from index ``begin`` to ``end``.

        Raises:
          TokenCacheError: [T608] a file has changed since it was written.
        """
        if not self._verified:
            for name, (_, expected) in self.files.items():
                if _file_checksum(self.path(name)) != expected:
                    raise _damaged(self.path(name), "its checksum is another one")
            self._verified.append(True)
        tokens, starts, mask = _opened(self)
        learned = None if mask is None else mask.read(begin, end)
        return token_range(tokens.read(begin, end), starts, learned, begin)

    def path(self, name: str) -> Path:
        """The file of one of the arrays."""
        return self.prefix.with_name(f"{self.prefix.name}.{name}.npy")

    def check_sizes(self) -> None:
        """Check that the files exist and are complete.

        Raises:
          TokenCacheError: [T608] they are not.
        """
        for name, (size, _) in self.files.items():
            with _reading(self.prefix.parent):
                found = self.path(name).stat().st_size
            if found != size:
                raise _damaged(self.path(name), f"{found:,} bytes instead of {size:,}")


def _file_checksum(path: Path) -> str:
    with _reading(path.parent), path.open("rb") as file:
        return checksum(*iter(lambda: file.read(_READ_BYTES), b""))


class _FileArray:
    """An array in a file, of which parts are read; the file stays open."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with _reading(path.parent):
            self._file = os.open(path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._file)
            with open(self._file, "rb", closefd=False) as stream:
                np.lib.format.read_magic(stream)
                header = np.lib.format.read_array_header_1_0(stream)
                self._dtype, self._begin = header[2], stream.tell()

    def read(self, begin: int, end: int) -> Any:
        """The elements from index ``begin`` to ``end``."""
        size = self._dtype.itemsize
        position, missing = self._begin + begin * size, (end - begin) * size
        parts = list[bytes]()
        with _reading(self._path.parent):
            while missing and (part := os.pread(self._file, missing, position)):
                parts.append(part)
                position, missing = position + len(part), missing - len(part)
        if missing:
            raise _damaged(self._path, f"it has become shorter: {position:,} bytes")
        return np.frombuffer(b"".join(parts), self._dtype)


@lru_cache(_MOST_OPEN)
def _opened(shard: StoredShard) -> tuple[_FileArray, Any, _FileArray | None]:
    """The tokens, the starts, which are read whole, and the mask of a shard."""
    with _reading(shard.prefix.parent):
        starts = np.load(shard.path("starts"))
    has_mask = "loss_mask" in shard.files
    mask = _FileArray(shard.path("loss_mask")) if has_mask else None
    return _FileArray(shard.path("tokens")), starts, mask


@dataclass(frozen=True)
class StoredBlock:
    """The shards of some consecutive units.

    Attributes:
      shards: In the order of the text.
      ignored: Keys of records that change what others would train on.
    """

    shards: Sequence[StoredShard]
    ignored: Sequence[str]


def read_block(folder: Path) -> StoredBlock:
    """The shards in a folder, whose files are opened when they are first read.

    Raises:
      TokenCacheError: [T608] the manifest or the size of a file is wrong.
    """
    manifest = folder / _MANIFEST
    with _reading(folder):
        content = manifest.read_bytes()
    text, _, expected = content.rpartition(b"\n")
    if checksum(text).encode() != expected:
        raise _damaged(manifest, "its checksum, the last line, is another one")
    stored = json.loads(text)
    shards = [
        StoredShard(folder / f"{i:05}", **s) for i, s in enumerate(stored["shards"])
    ]
    for shard in shards:
        shard.check_sizes()
    return StoredBlock(shards, stored["ignored"])


class BlockWriter:
    """Writes the documents of a block.

    Args:
      folder: An empty folder.
      separator: The id to insert before each document, or None.
      vocab_size: The tokenizer's vocabulary size.
    """

    def __init__(self, folder: Path, separator: int | None, vocab_size: int) -> None:
        self._folder = folder
        self._new = lambda: ShardBuilder(separator, vocab_size)
        self._builder = self._new()
        self._shards: list[dict[str, Any]] = []

    def add(self, ids: Ids, loss_mask: Any = None, num_bytes: int = 0) -> None:
        """Append a document; see ``ShardBuilder.add``."""
        self._builder.add(ids, loss_mask, num_bytes)
        if self._builder.num_tokens >= _SHARD_TOKENS:
            self._write_shard()

    def finish(self, ignored: Iterable[str]) -> None:
        """Write what is left, and last the manifest, with ignored keys of records."""
        if self._builder.num_bytes or self._builder.num_tokens:
            self._write_shard()
        manifest = {"shards": self._shards, "ignored": sorted(ignored)}
        text = json.dumps(manifest, indent=1).encode()
        with _created(self._folder / _MANIFEST) as file:
            file.write(text + b"\n" + checksum(text).encode())

    def _write_shard(self) -> None:
        arrays, files = self._builder.arrays(), dict[str, tuple[int, str]]()
        for name, array in arrays._asdict().items():
            if array is not None:
                path = self._folder / f"{len(self._shards):05}.{name}.npy"
                with _created(path) as file:
                    np.save(file, array)
                files[name] = path.stat().st_size, _file_checksum(path)
        self._shards.append(
            {
                "num_tokens": arrays.tokens.size,
                "num_documents": arrays.starts.size,
                "num_bytes": self._builder.num_bytes,
                "largest_id": int(arrays.tokens.max(initial=0)),
                "files": files,
            }
        )
        self._builder = self._new()


@contextmanager
def _created(path: Path) -> Iterator[Any]:
    """A new file, on the disk when the context ends."""
    with path.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def new_block(folder: Path, *, is_locked: bool) -> Iterator[Path]:
    """A temporary folder that becomes ``folder`` if the context ends without an error.

    Args:
      folder: Where the block will be.
      is_locked: Whether no other process writes it: what a killed one left is removed.
    """
    prefix = f".{folder.name}-"
    if is_locked:
        for leftover in folder.parent.glob(f"{prefix}*"):
            shutil.rmtree(leftover, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    try:
        yield temporary
        # Fails if another process was faster, on file systems without locks.
        with suppress(FileExistsError):
            try:
                temporary.rename(folder)
            except OSError:
                if not folder.exists():
                    raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # NumPy raises ValueError for a bad header
        name = getattr(error, "filename", None) or folder
        raise _damaged(Path(name), str(error)) from error


def _damaged(path: Path, got: str) -> TokenCacheError:
    return TokenCacheError(
        "a file of prepared tokens is damaged",
        got=f"{path}: {got}",
        fix="remove its folder, and the next run prepares this part of the text again: "
        f"rm -r '{path.parent}'",
    )
