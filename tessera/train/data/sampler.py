# SPDX-License-Identifier: Apache-2.0
"""Samples the examples of an epoch for each process, for custom data sets.

The trainer itself does not need it: ``corpus.train`` yields endless batches, each pass
in another order. This is for loops over epochs.
"""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from tessera.errors import (
    DataChangedError,
    EmptyDataError,
    SettingValueError,
    TesseraWarning,
)
from tessera.train.data.batches import Share

Indices: TypeAlias = np.ndarray


@dataclass
class _Position:
    """Where the loop over a sampler is: ``batch`` batches of an epoch are read."""

    epoch: int = 0
    batch: int = 0
    is_loaded: bool = False  # the next loop begins at the batch, not at 0


@dataclass(frozen=True)
class EpochSampler:
    """The indices of every batch of an epoch, divided among processes.

    The order of an epoch depends only on ``seed`` and the epoch's number. So processes
    agree on it without communication, and an epoch can be repeated.

    ``for indices in sampler`` reads an epoch: the one that ``set_epoch`` names, else
    the one after the last that was read to its end. (PyTorch's sampler repeats the same
    order unless ``set_epoch`` is called.) Works as the ``batch_sampler`` of PyTorch's
    ``DataLoader``; with workers the loader reads ahead, and so does ``state_dict``.

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
      SettingValueError: [T502] a number is none, such as the data in its place.
      EmptyDataError: [T602] there are no examples, or with ``drop_last`` fewer than a
        batch.

    Example:
      >>> sampler = EpochSampler(6, batch_size=4, shuffle=False)
      >>> len(sampler), [batch.tolist() for batch in sampler.epoch(0)]
      (2, [[0, 1, 2, 3], [4, 5, 0, 1]])
      >>> [batch.tolist() for batch in sampler]
      [[0, 1, 2, 3], [4, 5, 0, 1]]
    """

    num_examples: int
    batch_size: int
    process_index: int = 0
    process_count: int = 1
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    _position: _Position = field(
        default_factory=_Position, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        for name in ("num_examples", "batch_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
                raise SettingValueError(
                    f"{name} of EpochSampler is a whole number",
                    got=f"a {type(value).__name__}",
                    fix="EpochSampler(len(data), 32), and data[indices] in the loop",
                )
        Share(self.batch_size, self.process_index, self.process_count)  # validates
        least = self.batch_size if self.drop_last else 1
        if self.num_examples < least:
            can_keep = self.drop_last and self.num_examples > 0
            raise EmptyDataError(
                "there are too few examples for one batch",
                got=f"{self.num_examples} examples, a batch takes {self.batch_size}",
                fix=f"use a smaller batch{', or drop_last=False' if can_keep else ''}",
            )

    def __len__(self) -> int:
        """Batches of an epoch."""
        if self.drop_last:
            return self.num_examples // self.batch_size
        return -(-self.num_examples // self.batch_size)

    def __iter__(self) -> Iterator[Indices]:
        """This process's indices of each batch of the next epoch.

        Yields:
          int64 ``[batch_size / process_count]``.

        Raises:
          TesseraWarning: The last loop left the same epoch before its end.
        """
        position = self._position
        epoch, start = position.epoch, position.batch if position.is_loaded else 0
        if start != position.batch:
            warnings.warn(
                TesseraWarning(
                    f"epoch {epoch} begins again: the last loop left it after "
                    f"{position.batch} of {len(self)} batches; set_epoch({epoch + 1}) "
                    "begins the next one"
                ),
                stacklevel=2,
            )
        position.batch, position.is_loaded = start, False
        for batch in self.epoch(epoch, start):
            position.batch += 1
            yield batch
        position.epoch, position.batch = epoch + 1, 0

    def set_epoch(self, number: int) -> None:
        """Let the next loop read this epoch, from where ``load_state_dict`` says."""
        position = self._position
        if number != position.epoch or not position.is_loaded:
            position.epoch, position.batch, position.is_loaded = number, 0, False

    def state_dict(self) -> dict[str, int]:
        """The position of the loop and what the order depends on, for a checkpoint.

        It is the same in every process. ``epoch`` is the one to go on with, of which
        ``examples`` were read.
        """
        position = self._position
        is_over = position.batch == len(self)
        return {
            "epoch": position.epoch + is_over,
            "examples": 0 if is_over else position.batch * self.batch_size,
            **self._order_settings(),
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Let the next loop go on where ``state_dict`` was called.

        The batch size and the number of processes may be others.

        Raises:
          DataChangedError: [T803] the examples have another order, or the position is
            inside of a batch of this size.
        """
        now = self._order_settings() | {"examples": int(state["examples"])}
        changes = [
            f"{name}: {int(state[name])} -> {value}"
            for name, value in now.items()
            if int(state[name]) != value
        ]
        batch, rest = divmod(now["examples"], self.batch_size)
        if rest:
            changes.append(f"examples read: {now['examples']}, {rest} in a batch")
        if changes:
            raise DataChangedError(
                "the sampler cannot go on: its data has changed",
                got="\n".join(changes),
                fix="use the data, the seed and the batch size of the checkpoint, or "
                f"begin its epoch again: set_epoch({int(state['epoch'])})",
            )
        position = self._position
        position.epoch, position.batch = int(state["epoch"]), batch
        position.is_loaded = True

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

    def _order_settings(self) -> dict[str, int]:
        """What the order of an epoch depends on."""
        return {
            "num_examples": self.num_examples,
            "seed": self.seed,
            "shuffle": int(self.shuffle),
        }

    def _order(self, number: int) -> Indices:
        if not self.shuffle:
            return np.arange(self.num_examples)
        # PCG64 by name: the algorithm of default_rng may change with NumPy.
        draw = np.random.Generator(np.random.PCG64([self.seed, number]))
        return draw.permutation(self.num_examples)
