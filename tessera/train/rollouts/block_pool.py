# SPDX-License-Identifier: Apache-2.0
"""``BlockPool``: which blocks of a cache are in use, and how often."""

from collections.abc import Iterable

# The block that belongs to nobody; see ``models/paged_cache.py``.
NO_BLOCK = 0


class BlockPool:
    """The blocks of one part of a cache and one kind of layer.

    Args:
      size: Blocks, that of nobody included.

    Attributes:
      uses: How many tables have each block.
    """

    def __init__(self, size: int) -> None:
        self.uses = [0] * size
        self._free = [*range(size - 1, NO_BLOCK, -1)]

    @property
    def num_free(self) -> int:
        """Blocks that ``take`` can give."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """So many blocks, each with one use; there are as many."""
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self.uses[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> list[int]:
        """The same blocks, for one more table."""
        shared = [*blocks]
        for block in shared:
            self.uses[block] += block != NO_BLOCK
        return shared

    def release(self, blocks: Iterable[int]) -> None:
        """End one use of each."""
        for block in blocks:
            if block == NO_BLOCK:
                continue
            self.uses[block] -= 1
            if not self.uses[block]:
                self._free.append(block)
