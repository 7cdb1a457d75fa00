# SPDX-License-Identifier: Apache-2.0
"""Rows of records that are two documents of the stream, 2k and 2k + 1.

Of a preference they are the better and the worse answer, each after the prompt, of
which nothing is learned; of a prompt its tokens, and its record, a token a byte of
JSON.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tessera.train.data.chat_template import Conversation, Message
from tessera.train.data.conversation_rows import WholeRows
from tessera.train.data.packing import TokenArrays, TokenStream
from tessera.train.data.record_values import conversation_value


class PreferenceRows(WholeRows):
    """The rows of a stream of pairs, created on access.

    Segments 2k + 1 and 2k + 2 of a row are the better and the worse answer of its k-th
    pair. One that does not exist has no target, and may have no position at the end of
    a row. A pair that is longer than a row is in none.

    Args:
      stream: The tokens.
      sequence_length: S, the number of positions in a row.

    Attributes:
      num_pairs: Pairs of all rows.
      num_labelled: Those of them with one answer alone.
      num_long: Pairs that are longer than a row.
      num_equal: Records whose answers are equal, or one of them empty: in no row.

    Raises:
      TokenCacheError: [T608] a shard is damaged.
    """

    def __init__(self, stream: TokenStream, sequence_length: int) -> None:
        super().__init__(stream, sequence_length, keep_tail=True)
        learned = [np.empty(0, np.int64)]
        for shard in stream.shards:
            part = shard.read(0, shard.num_tokens)
            assert part.loss_mask is not None, "an answer has a mask"
            mask = part.loss_mask.copy()
            mask[part.starts] = False  # the first token of a document is no target
            learned.append(np.add.reduceat(mask, part.starts, dtype=np.int64))
        targets = np.concatenate(learned).reshape(-1, 2)
        ranges = _ranges_of(stream)
        sizes, is_pair = ranges[:, 2] - ranges[:, 0], targets.any(1)
        fits = is_pair & (sizes <= sequence_length + 1)
        self.longest = int(sizes[is_pair].max(initial=0))
        self.num_pairs, self.num_long = int(fits.sum()), int((is_pair & ~fits).sum())
        self.num_labelled = int((fits & ~targets.all(1)).sum())
        self.num_equal, self.num_learned = (
            int((~is_pair).sum()),
            int(targets[fits].sum()),
        )
        self._place(ranges[fits][:, ::2])

    @staticmethod
    def describe_cut(title: str, sides: "Sequence[PreferenceRows]") -> str:
        """How many records of a source are in no row; nothing if all are in one."""
        longest, text = max(sides, key=lambda side: side.longest), ""
        if equal := sum(side.num_equal for side in sides):
            text = f"; {equal:,} records have equal answers or an empty one"
        if long := sum(side.num_long for side in sides):
            text += (
                f"; {long:,} pairs are longer than training.sequence_length="
                f"{longest.sequence_length}, and {longest.length_of_all} takes all, as "
                f"the longest has {longest.longest:,} tokens"
            )
        count = sum(side.stream.num_documents for side in sides) // 2
        return text and f"{title}: of {count:,} records some are left out{text}"


@dataclass(frozen=True)
class Prompt:
    """What a model answers.

    Attributes:
      ids: Its tokens, int32 [tokens]: of messages with the beginning of an answer.
      content: The text or the messages.
      columns: The other values of the record, as JSON has them.
    """

    ids: npt.NDArray[np.int32]
    content: str | list[Message]
    columns: Mapping[str, Any]

    @property
    def conversation(self) -> Conversation | None:
        """The messages, with what else the chat template is given; None of a text."""
        if isinstance(self.content, str):
            return None
        return conversation_value({**self.columns, "": self.content}, "")


class PromptRows(WholeRows):
    """The prompts of a stream that are not too long, each a row without targets.

    Args:
      stream: The prompts and their records. Its sizes become those of the prompts.
      sequence_length: The most tokens of a prompt.

    Raises:
      TokenCacheError: [T608] a shard is damaged.
    """

    def __init__(self, stream: TokenStream, sequence_length: int) -> None:
        super().__init__(stream, sequence_length, keep_tail=True)
        ranges = _ranges_of(stream)
        sizes = ranges[:, 1] - ranges[:, 0]
        self.longest = int(sizes.max(initial=0))
        stream.num_tokens, stream.num_documents = int(sizes.sum()), sizes.size
        self._ranges = ranges[sizes <= sequence_length]
        self._length = len(self._ranges)

    def prompt(self, index: int) -> Prompt:
        """A prompt.

        Raises:
          TokenCacheError: [T608] a shard is damaged.
        """
        begin, middle, end = self._ranges[index].tolist()
        ids, content = np.split(self.stream.read(begin, end).tokens, [middle - begin])
        columns = json.loads(content.astype(np.uint8).tobytes())
        return Prompt(ids.astype(np.int32), columns.pop(next(iter(columns))), columns)

    @property
    def length_of_all(self) -> int:
        """The room of the longest, of which the rows of a step are made."""
        return self.longest

    def _window(self, index: int) -> TokenArrays:
        ids = np.append(self.prompt(index).ids, np.int32(0))  # which is no position
        return TokenArrays(ids, np.zeros(1, np.int64), np.zeros(ids.size, bool))

    @staticmethod
    def describe_cut(title: str, sides: "Sequence[PromptRows]") -> str:
        """How many prompts of a source are too long; nothing if none is."""
        count = sum(side.stream.num_documents for side in sides)
        if not (long := count - sum(map(len, sides))):
            return ""
        return (
            f"{title}: {long:,} of {count:,} prompts have more than "
            f"{sides[0].sequence_length:,} tokens and are left out; the longest has "
            f"{max(side.longest for side in sides):,}"
        )


def _ranges_of(stream: TokenStream) -> npt.NDArray[np.int64]:
    """Where the two documents of each record begin, and the end, [records, 3]."""
    ends = np.append(stream.document_starts(), stream.num_tokens)
    return np.stack([ends[:-1:2], ends[1::2], ends[2::2]], 1)
