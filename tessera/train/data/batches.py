# SPDX-License-Identifier: Apache-2.0
"""Batches rows with grain: shuffled, repeated, divided among processes, prefetched.

Global batch b holds the rows ``order[b*B : (b+1)*B]``, and process p of P the p-th of
P equal parts of it, whatever P is. In training ``order`` takes rows from each source in
proportion to its weight, and from a source one random permutation of its rows after
another; in validation it is one permutation of a source, the same for every seed.
Training can start at any row of ``order``, which is the only state of a reader.
"""

import hashlib
from collections.abc import Generator, Sequence, Sized
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import grain

from tessera.errors import BatchSizeError
from tessera.train.data.packing import Batch, PackedRows


class _Rows(Sized, Protocol):
    def __getitem__(self, index: int) -> Batch | None: ...


@dataclass(frozen=True)
class Share:
    """The rows of every global batch that this process reads.

    Attributes:
      batch_size: Rows of the global batch, B.
      process_index: p.
      process_count: P; P times M divides B.
      microbatches: M: a batch is M smaller ones in sequence, each of which is divided
        among the processes.
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
            micro = (
                f" / {self.microbatches} microbatches" if self.microbatches > 1 else ""
            )
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
        """The position in a batch of the ``index``-th row that this process reads."""
        micro = self.local_size // self.microbatches
        microbatch, offset = divmod(index, micro)
        return (microbatch * self.process_count + self.process_index) * micro + offset


class _SharedRows:
    """This process's rows of every global batch, in order; a source for grain."""

    def __init__(self, rows: _Rows, share: Share, start_row: int) -> None:
        self._rows, self._share, self._start = rows, share, start_row

    def __len__(self) -> int:
        batches = (len(self._rows) - self._start) // self._share.batch_size
        return batches * self._share.local_size

    def __getitem__(self, index: int) -> Batch | None:
        share = self._share
        batch, offset = divmod(index, share.local_size)
        return self._rows[self._start + batch * share.batch_size + share.row(offset)]


class _PaddedRows:
    """Rows, padded to a whole number of batches."""

    def __init__(self, rows: _Rows, padding: Batch, batch_size: int) -> None:
        self._rows, self._padding, self._batch_size = rows, padding, batch_size

    def __len__(self) -> int:
        return -(-len(self._rows) // self._batch_size) * self._batch_size

    def __getitem__(self, index: int) -> Batch | None:
        return self._rows[index] if index < len(self._rows) else self._padding


def train_batches(
    sources: Sequence[PackedRows],
    weights: Sequence[float],
    share: Share,
    *,
    seed: int,
    start_row: int,
    prefetch: int,
) -> Generator[Batch, None, None]:
    """Endless batches, from row ``start_row`` of the order on.

    Each pass over the rows of a source has its own order, determined by ``seed``. A
    batch may span two passes, so no row is skipped.
    """
    datasets = [grain.MapDataset.source(rows) for rows in sources]
    return _batches(_mixed(datasets, weights, seed), share, start_row, prefetch)


def order_fingerprint(
    num_rows: Sequence[int], weights: Sequence[float], seed: int
) -> str:
    """A fingerprint of the order in which training reads rows, 16 hex digits.

    It also changes if another version of grain shuffles or mixes differently.

    Args:
      num_rows: The rows of each source.
      weights: The weight of each source.
      seed: The seed of the order.
    """
    ends = list(accumulate(num_rows))
    first = list[int]()
    if all(num_rows):
        datasets = [
            grain.MapDataset.range(end - rows, end)
            for end, rows in zip(ends, num_rows, strict=True)
        ]
        order = _mixed(datasets, weights, seed)
        first = [order[index] for index in range(64)]
    ratios = [weight / sum(weights) for weight in weights] if len(weights) > 1 else ""
    return hashlib.blake2b(f"{first}{ratios}".encode(), digest_size=8).hexdigest()


def training_order(num_rows: int, seed: int, positions: range) -> list[int]:
    """The rows at some positions of the order of training from one source."""
    order: Any = _mixed([grain.MapDataset.range(num_rows)], [1.0], seed)
    return [order[position] for position in positions]


def validation_order(num_rows: int, limit: int | None) -> list[int]:
    """The rows of a source in the order of validation, or the first of them."""
    order: Any = grain.MapDataset.range(num_rows).shuffle(0)
    return [order[position] for position in range(num_rows)[:limit]]


def _mixed(
    sources: Sequence[grain.MapDataset[Any]], weights: Sequence[float], seed: int
) -> grain.MapDataset[Any]:
    """The endless order of training: sources in proportion, each shuffled by pass."""
    shuffled = [
        source.shuffle(_grain_seed(seed, number)).repeat()
        for number, source in enumerate(sources)
    ]
    return grain.MapDataset.mix(shuffled, weights)


def _grain_seed(seed: int, source: int) -> int:
    # grain's order in pass e depends on seed + e: adjacent seeds would share orders.
    text = f"shuffle/{seed}" + (f"/{source}" if source else "")
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")


def validation_batches(
    rows: PackedRows, share: Share, *, prefetch: int, limit: int | None = None
) -> Generator[Batch, None, None]:
    """Every row once, or the first ``limit`` of them; the last batch is padded."""
    shuffled = grain.MapDataset.source(rows).shuffle(0)[:limit]
    padded = _PaddedRows(shuffled, rows.padding(), share.batch_size)
    return _batches(padded, share, 0, prefetch)


def _batches(
    rows: _Rows, share: Share, start_row: int, prefetch: int
) -> Generator[Batch, None, None]:
    assert start_row >= 0, f"start_row is {start_row}"
    # One thread: two would compete for the interpreter lock.
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=prefetch)
    source = grain.MapDataset.source(_SharedRows(rows, share, start_row))
    # There is no remainder to drop, but otherwise grain computes the length in floats,
    # which overflow for an endless source.
    batches = source.batch(share.local_size, drop_remainder=True)
    return closing(iter(batches.to_iter_dataset(options)))


def closing(iterator: grain.DatasetIterator[Batch]) -> Generator[Batch, None, None]:
    """Yield from ``iterator``, and close it at the end or when this is closed."""
    try:
        yield from iterator
    finally:
        # grain keeps its thread until garbage collection otherwise.
        iterator.close()
