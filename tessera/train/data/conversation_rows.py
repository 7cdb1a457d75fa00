# SPDX-License-Identifier: Apache-2.0
"""Packs conversations into rows, each of them whole in one row, from its beginning.

``WholeRows`` serves other ranges of tokens, too.

A row that began inside of an answer would learn that answer without its question.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tessera.train.data.packing import PackedRows, TokenArrays, TokenStream


class WholeRows(PackedRows):
    """Rows of ranges of a stream, each whole in one row.

    Attributes:
      num_learned: Targets of all rows.
      longest: Tokens of the longest range, in a row or not.
    """

    num_learned: int
    longest: int

    def _place(self, ranges: npt.NDArray[np.int64]) -> None:
        """Choose the row of each range, [ranges, 2], of at most S + 1 tokens."""
        self._ranges = ranges
        # The last token of a row is a target only.
        rows = _best_fit(np.diff(ranges)[:, 0], self.sequence_length + 1)
        self._length = int(rows.max(initial=-1)) + 1
        self._order = np.argsort(rows, kind="stable")
        self._first = np.searchsorted(rows[self._order], np.arange(self._length + 1))
        self._layout = ranges, self._order, self._first

    @property
    def length_of_all(self) -> int:
        """A sequence length that cuts none, which many devices can divide."""
        return -(-(self.longest - 1) // 128) * 128

    def _window(self, index: int) -> TokenArrays:
        numbers = self._order[self._first[index] : self._first[index + 1]]
        ranges = self._ranges[numbers].tolist()
        parts = [self.stream.read(begin, end) for begin, end in ranges]
        masks = [
            np.ones(part.tokens.size, bool) if (m := part.loss_mask) is None else m
            for part in parts
        ]
        begins = np.cumsum([0, *(mask.size for mask in masks[:-1])])
        starts = [part.starts + at for part, at in zip(parts, begins, strict=True)]
        tokens = np.concatenate([part.tokens for part in parts])
        return TokenArrays(tokens, np.concatenate(starts), np.concatenate(masks))


class ConversationRows(WholeRows):
    """The rows of a stream of conversations, created on access.

    Of a conversation that is longer than a row the row has the first tokens. One that
    has no learned token among these is in no row.

    Args:
      stream: The tokens; each document is a conversation.
      sequence_length: S, the number of positions in a row.

    Attributes:
      num_learned: Targets of all rows.
      num_cut: Conversations that are longer than a row.
      num_left_out: Those of them that are in no row.
      longest: Tokens of the longest conversation.

    Raises:
      TokenCacheError: [T608] a shard is damaged.
    """

    def __init__(self, stream: TokenStream, sequence_length: int) -> None:
        super().__init__(stream, sequence_length, keep_tail=True)
        # The last token of a row is a target only.
        most = sequence_length + 1
        self.num_learned = self.num_cut = self.num_left_out = self.longest = 0
        ranges = [np.empty((0, 2), np.int64)]
        for shard, at in zip(stream.shards, stream.begins, strict=False):
            part = shard.read(0, shard.num_tokens)
            stops = np.append(part.starts[1:], shard.num_tokens)
            kept = np.minimum(stops, part.starts + most)
            mask = part.loss_mask
            learned = kept - part.starts - 1
            if mask is not None:
                before = np.concatenate([[0], np.cumsum(mask)])
                learned = before[kept] - before[part.starts + 1]
            self.num_learned += int(learned.sum())
            self.num_cut += int((kept < stops).sum())
            self.num_left_out += int(((kept < stops) & (learned == 0)).sum())
            self.longest = max(self.longest, int((stops - part.starts).max()))
            ranges.append(np.stack([part.starts, kept], 1)[learned > 0] + at)
        self._place(np.concatenate(ranges))

    @staticmethod
    def describe_cut(title: str, sides: "Sequence[ConversationRows]") -> str:
        """How many conversations of a source are cut; nothing if none is."""
        cut = sum(side.num_cut for side in sides)
        if not cut:
            return ""
        count = sum(side.stream.num_documents for side in sides)
        length = sides[0].sequence_length
        longest = max(sides, key=lambda side: side.longest)
        text = (
            f"{title}: {cut:,} of {count:,} conversations are longer than "
            f"training.sequence_length={length} and are cut there"
        )
        if left_out := sum(side.num_left_out for side in sides):
            text += f", {left_out:,} of them left out: their first answer begins later"
        return (
            f"{text}; training.sequence_length={longest.length_of_all} takes all of "
            f"them whole, as the longest has {longest.longest:,} tokens"
        )


def learned_share(sides: Sequence[ConversationRows]) -> float | None:
    """The share of the tokens that have a loss; None where there are no tokens."""
    tokens = sum(side.stream.num_tokens for side in sides)
    return sum(side.num_learned for side in sides) / tokens if tokens else None


def _best_fit(lengths: npt.NDArray[np.int64], most: int) -> npt.NDArray[np.int64]:
    """The row of each document: the longest first, each where the least is left.

    "Fewer Truncations Improve Language Modeling", arXiv 2404.10830.
    """
    rows = np.empty(lengths.size, np.int64)
    # Rows by the tokens that they have left, and these numbers in order.
    open_rows, left = defaultdict[int, list[int]](list), list[int]()
    count = 0
    for number in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[number])
        at = bisect_left(left, length)
        if at == len(left):
            row, space, count = count, most, count + 1
        else:
            space = left[at]
            row = open_rows[space].pop()
            if not open_rows[space]:
                left.pop(at)
        rows[number], space = row, space - length
        if not open_rows[space]:
            insort(left, space)
        open_rows[space].append(row)
    return rows
