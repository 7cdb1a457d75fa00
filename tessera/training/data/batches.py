# SPDX-License-Identifier: Apache-2.0
"""Rows to batches, by grain: shuffled, repeated, divided among processes, prefetched.

Global batch b holds the rows ``order[b*B : (b+1)*B]``, and process p of P the p-th of
P equal parts of it, whatever P is. In training ``order`` is one random permutation of
the rows after another; in validation it is one permutation, the same for every seed.
"""

import hashlib
from collections.abc import Generator, Sized
from dataclasses import dataclass
from typing import Protocol

import grain

from tessera.errors import BatchSizeError
from tessera.training.data.packing import Batch, PackedRows


class _Rows(Sized, Protocol):
    def __getitem__(self, index: int) -> Batch | None: ...


@dataclass(frozen=True)
class Share:
    """Which rows of every global batch this process reads.

    Attributes:
      batch_size: Rows of the global batch, B.
      process_index: p.
      process_count: P; P times M divides B.
      microbatches: M: a batch is so many smaller ones in a row, and each of them is
        what the processes divide among themselves.
    """

    batch_size: int
    process_index: int
    process_count: int
    microbatches: int = 1

    def __post_init__(self) -> None:
        size, count = self.batch_size, self.process_count
        assert 0 <= self.process_index < count, f"no process {self.process_index}"
        each = count * self.microbatches
        if size < 1 or size % each:
            below, above = size // each * each, (max(size, 0) // each + 1) * each
            micro = f" / {self.microbatches} microbatches" * (self.microbatches > 1)
            raise BatchSizeError(
                "the global batch cannot be divided evenly over the processes",
                got=f"{size} rows{micro} / {count} processes",
                fix=f"use {f'{below} or ' if below > 0 else ''}{above} rows",
            )

    @property
    def local_size(self) -> int:
        """Rows of each batch that this process reads."""
        return self.batch_size // self.process_count

    def row(self, index: int) -> int:
        """Which row of the order is the ``index``-th that this process reads."""
        micro = self.local_size // self.microbatches
        microbatch, offset = divmod(index, micro)
        return (microbatch * self.process_count + self.process_index) * micro + offset


class _SharedRows:
    """This process's rows of every global batch, in order; a source for grain."""

    def __init__(self, rows: _Rows, share: Share) -> None:
        self._rows, self._share = rows, share

    def __len__(self) -> int:
        return len(self._rows) // self._share.batch_size * self._share.local_size

    def __getitem__(self, index: int) -> Batch | None:
        share = self._share
        batch, offset = divmod(index, share.local_size)
        first, offset = batch * share.batch_size, share.row(offset)
        return self._rows[first + offset]


class _FilledRows:
    """Rows followed by padding up to a whole number of batches."""

    def __init__(self, rows: _Rows, padding: Batch, batch_size: int) -> None:
        self._rows, self._padding, self._batch_size = rows, padding, batch_size

    def __len__(self) -> int:
        return -(-len(self._rows) // self._batch_size) * self._batch_size

    def __getitem__(self, index: int) -> Batch | None:
        return self._rows[index] if index < len(self._rows) else self._padding


def train_batches(
    rows: PackedRows, share: Share, *, seed: int, start_step: int, prefetch: int
) -> Generator[Batch, None, None]:
    """Batches without end, from global batch ``start_step`` on.

    Each pass over the rows has its own order, which ``seed`` decides. A batch may hold
    the end of one pass and the beginning of the next, so that no row is passed over.
    """
    # grain's order in pass e depends on seed + e: seeds that are neighbors would share
    # their orders.
    digest = hashlib.blake2b(f"shuffle/{seed}".encode(), digest_size=4).digest()
    shuffled = grain.MapDataset.source(rows).shuffle(int.from_bytes(digest, "big"))
    return _batches(shuffled.repeat(), share, start_step, prefetch)


def validation_batches(
    rows: PackedRows, share: Share, *, prefetch: int
) -> Generator[Batch, None, None]:
    """Every row once; the last batch is filled up with padding."""
    shuffled = grain.MapDataset.source(rows).shuffle(0)
    filled = _FilledRows(shuffled, rows.padding(), share.batch_size)
    return _batches(filled, share, 0, prefetch)


def _batches(
    rows: _Rows, share: Share, start_step: int, prefetch: int
) -> Generator[Batch, None, None]:
    assert start_step >= 0, f"start_step is {start_step}"
    # One thread: two would only take turns at the interpreter lock.
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=prefetch)
    source = grain.MapDataset.source(_SharedRows(rows, share))
    # Dropping the remainder, of which there is none, keeps the length an integer: grain
    # divides in floats otherwise, and the length of an endless source overflows.
    batches = source.batch(share.local_size, drop_remainder=True)
    iterator = iter(batches.to_iter_dataset(options))
    iterator.set_state({"next_index": start_step})
    return closing(iterator)


def closing(iterator: grain.DatasetIterator[Batch]) -> Generator[Batch, None, None]:
    """Give what ``iterator`` gives; close it at its end, or when closed oneself."""
    try:
        yield from iterator
    finally:
        # grain would keep its thread until the garbage collector comes by.
        iterator.close()
