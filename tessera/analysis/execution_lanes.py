# SPDX-License-Identifier: Apache-2.0
"""``Lanes``: the executions of a computation that are evaluated together."""

from dataclasses import dataclass
from typing import Final

import numpy as np

_MAX_LANES: Final = 2**16


@dataclass(frozen=True)
class Lanes:
    """Executions of a computation that are looked at, int ``[L]`` each.

    Attributes:
      outer: The caller's lane of each.
      steps: A number that lanes have in common that differ in their device alone.
      counters: In a loop, the number of the iteration.
      partitions: The device, by its position in the program's list; None where it does
        not matter.
    """

    outer: np.ndarray
    steps: np.ndarray
    counters: np.ndarray | None = None
    partitions: np.ndarray | None = None

    @classmethod
    def first(cls, partitions: np.ndarray | None = None) -> "Lanes":
        """Of the program itself: one, or one for each of some devices."""
        count = 1 if partitions is None else len(partitions)
        return cls(np.zeros(count, int), np.zeros(count, int), None, partitions)

    def __len__(self) -> int:
        return len(self.outer)

    def inner(self, outer: np.ndarray) -> "Lanes":
        """Those of a computation that is executed once in some of these."""
        partitions = None if self.partitions is None else self.partitions[outer]
        return Lanes(outer, self.steps[outer], None, partitions)

    def repeated(self, count: int) -> "Lanes":
        """Those of a loop's body, or a sample of very many."""
        outer, counters = np.divmod(_sampled(len(self) * count), count)
        inner = self.inner(outer)
        steps = inner.steps * count + counters
        return Lanes(outer, steps, counters, inner.partitions)


def _sampled(count: int) -> np.ndarray:
    """The numbers up to a count, or a sample of them that is always the same."""
    if count <= _MAX_LANES:
        return np.arange(count)
    chosen = np.random.default_rng(0).integers(0, count, _MAX_LANES)
    return np.sort(chosen)
