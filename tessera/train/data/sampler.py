# SPDX-License-Identifier: Apache-2.0
"""Samples the examples of an epoch for each process, for custom data sets.

The trainer itself does not need it: ``corpus.train`` yields endless batches, each pass
in another order. This is for loops over epochs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from tessera.errors import EmptyDataError
from tessera.train.data.batches import Share

Indices: TypeAlias = np.ndarray


@dataclass(frozen=True)
class EpochSampler:
    """The indices of every batch of an epoch, divided among processes.

    The order of an epoch depends only on ``seed`` and the epoch's number. So processes
    agree on it without communication, an epoch can be repeated, and there is no state
    to set.

    Attributes:
      num_examples: Examples of the data set.
      batch_size: Examples of the global batch.
      process_index: This process.
      process_count: How many processes share each batch; divides ``batch_size``. A
        global batch is the same for any number of them.
      seed: Seed of the orders.
      shuffle: False reads the examples in order, in every epoch.
      drop_last: Drop an incomplete last batch; by default it is filled with the first
        examples of the epoch's order.

    Raises:
      BatchSizeError: [T503] ``process_count`` does not divide ``batch_size``.
      EmptyDataError: [T602] there are no examples, or with ``drop_last`` fewer than a
        batch.

    Example:
      >>> sampler = EpochSampler(6, batch_size=4, shuffle=False)
      >>> len(sampler), [batch.tolist() for batch in sampler.epoch(0)]
      (2, [[0, 1, 2, 3], [4, 5, 0, 1]])
    """

    num_examples: int
    batch_size: int
    process_index: int = 0
    process_count: int = 1
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False

    def __post_init__(self) -> None:
        Share(self.batch_size, self.process_index, self.process_count)  # validates
        least = self.batch_size if self.drop_last else 1
        if self.num_examples < least:
            raise EmptyDataError(
                "there are too few examples for one batch",
                got=f"{self.num_examples} examples, a batch takes {self.batch_size}",
                fix="use a smaller batch"
                + (
                    ", or drop_last=False"
                    if self.drop_last and self.num_examples
                    else ""
                ),
            )

    def __len__(self) -> int:
        """Batches of an epoch."""
        if self.drop_last:
            return self.num_examples // self.batch_size
        return -(-self.num_examples // self.batch_size)

    def epoch(self, number: int, start: int = 0) -> Iterator[Indices]:
        """This process's indices of each batch of an epoch, from batch ``start`` on.

        Yields:
          int64 ``[batch_size / process_count]``.
        """
        order = self._order(number)
        # np.resize repeats the order, several times if a batch is larger than that.
        order = np.resize(order, len(self) * self.batch_size)
        shared = order.reshape(len(self), self.process_count, -1)
        yield from shared[start:, self.process_index]

    def _order(self, number: int) -> Indices:
        if not self.shuffle:
            return np.arange(self.num_examples)
        # PCG64 by name: the algorithm of default_rng may change with NumPy.
        draw = np.random.Generator(np.random.PCG64([self.seed, number]))
        return draw.permutation(self.num_examples)
