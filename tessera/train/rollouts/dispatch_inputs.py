# SPDX-License-Identifier: Apache-2.0
"""The arrays that programs take, from the rows and blocks of each part."""

from collections.abc import Iterator, Sequence

import numpy as np

from tessera.train.models.paged_cache import NO_WRITE, Pages
from tessera.train.rollouts.batch_part import BatchPart, Fill, Tables
from tessera.train.rollouts.programs import Slots

# Blocks of the chunks in which prompts are computed: a program for each.
CHUNKS = (1, 4, 16)


class _Pages:
    """Pages that are filled in slot by slot.

    Args:
      shape: Parts and slots.
      kinds: Kinds of layers.
      sizes: The most blocks of a row, and the most that are written.
      block: Tokens of a block.
    """

    def __init__(
        self, shape: tuple[int, int], kinds: int, sizes: tuple[int, int], block: int
    ) -> None:
        width, few = sizes
        self._starts, self._block = np.zeros(shape, np.int32), block
        self._tables = [np.zeros((*shape, width), np.int32) for _ in range(kinds)]
        self._writes = [
            np.full((*shape, few), NO_WRITE, np.int32) for _ in range(kinds)
        ]

    def set(
        self, part: int, slot: int, start: int, tables: Tables, writes: Tables
    ) -> None:
        """The row of a slot: its cached tokens, their blocks, and those of the new."""
        self._starts[part, slot] = start
        cached = -(-start // self._block)
        read = [table[:cached] for table in tables]
        for arrays, lists in ((self._tables, read), (self._writes, writes)):
            for array, blocks in zip(arrays, lists, strict=True):
                array[part, slot, : len(blocks)] = blocks

    def arrays(self) -> Pages:
        """What a program takes."""
        tables, writes = tuple(self._tables), tuple(self._writes)
        return Pages(self._starts, tables, writes, self._block)  # type: ignore[arg-type]


def chunks_of_fills(
    fills: Sequence[Sequence[Fill]], kinds: int, width: int, block: int
) -> Iterator[tuple[Pages, np.ndarray]]:
    """The chunks of the rows of all parts: pages, and tokens ``[P, rows, chunk]``.

    All have as many tokens: some short rows, or one long one of each part.
    """
    most = CHUNKS[-1]
    waiting = [[*own] for own in fills]
    while any(waiting):
        for own in waiting:
            own.sort(key=lambda each: each.missing, reverse=True)
        few = min(CHUNKS, key=lambda few: _num_calls(waiting, few, block))
        shape = len(waiting), most // few
        tokens = np.zeros((*shape, few * block), np.int32)
        pages = _Pages(shape, kinds, (width, few), block)
        for part, own in enumerate(waiting):
            for slot, each in enumerate(own[: most // few]):
                start, end = each.start, each.start + few * block
                ids = each.tokens[start:end]
                tokens[part, slot, : len(ids)] = ids
                first = start // block
                writes = [table[first : first + few] for table in each.tables]
                pages.set(part, slot, start, each.tables, writes)
                each.start = end
        yield pages.arrays(), tokens
        waiting = [[each for each in own if each.missing > 0] for own in waiting]


def _num_calls(waiting: Sequence[Sequence[Fill]], few: int, block: int) -> int:
    """How many programs take all rows in chunks of so many blocks."""
    chunks = [[-(-row.missing // (few * block)) for row in own] for own in waiting]
    at_a_time = CHUNKS[-1] // few
    return max(max(-(-sum(own) // at_a_time), *own) for own in chunks if own)


def inputs_of_rows(
    parts: Sequence[BatchPart],
    keys: np.ndarray,
    kinds: int,
    width: int,
    block: int,
    steps: int,
) -> tuple[Pages, Slots]:
    """What the next dispatch takes, whose writes are then in the rows' tables."""
    shape = len(parts), len(parts[0].slots)
    pages = _Pages(shape, kinds, (width, (steps + 2 * block - 2) // block), block)
    tokens, counts, limits = (np.zeros(shape, np.int32) for _ in range(3))
    own_keys = np.zeros((*shape, *keys.shape[1:]), keys.dtype)
    for part, each in enumerate(parts):
        for slot, row in enumerate(each.slots):
            if row is None:
                continue
            place = part, slot
            pages.set(*place, row.cached, row.tables, row.writes)
            tokens[place], counts[place] = row.last, len(row.tokens)
            limits[place] = row.limit - len(row.tokens)
            own_keys[place] = keys[row.number]
            each.commit(row)
    return pages.arrays(), Slots(tokens, counts, limits, own_keys)  # type: ignore[arg-type]
