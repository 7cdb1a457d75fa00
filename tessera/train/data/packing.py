# SPDX-License-Identifier: Apache-2.0
"""Packs documents into rows: one token stream, cut every ``sequence_length``.

    documents   [h e y] [y o]                      S = 4, separator |
    stream      | h e y | y o
    row 0       tokens | h e y    targets h e y |    segments 1 1 1 1
    row 1       tokens | y _ _    targets y o _ _    segments 1 1 0 0

Row r reads ``stream[r*S : (r+1)*S + 1]``, so every token of the stream except the first
is the target of exactly one position. The target of a document's last token is the
separator after it, from which a model learns where documents end.

A stream is a sequence of shards, each of whole documents. A row that spans shards is
copied from both; nothing else of them is read.
"""

import hashlib
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from tessera.foundations.labels import IGNORE_INDEX
from tessera.train.data.tokenization import Ids

Batch = dict[str, npt.NDArray[np.int32] | npt.NDArray[np.float32]]
LossMask = npt.NDArray[np.bool_]


class TokenArrays(NamedTuple):
    """The documents of a shard, or of a range of it or of a stream.

    Attributes:
      tokens: Concatenated, each document after its separator, [tokens]; of a shard
        uint16 where the vocabulary allows it, else uint32, and of a stream int32.
      starts: The index at which each document starts, with its separator; int64,
        [documents].
      loss_mask: Which tokens are learned; the others are the target of no position.
        bool, [tokens]; None means that all are learned.
    """

    tokens: npt.NDArray[np.int32 | np.uint16 | np.uint32]
    starts: npt.NDArray[np.int64]
    loss_mask: LossMask | None


def token_range(
    tokens: npt.NDArray[np.int32 | np.uint16 | np.uint32],
    starts: npt.NDArray[np.int64],
    loss_mask: LossMask | None,
    begin: int,
) -> TokenArrays:
    """A range of a shard, whose documents start relative to it.

    Args:
      tokens: Those of the range.
      starts: Those of the shard.
      loss_mask: Which tokens of the range are learned, or None.
      begin: Where the range begins.
    """
    inner = slice(*np.searchsorted(starts, (begin, begin + tokens.size)))
    return TokenArrays(tokens, starts[inner] - begin, loss_mask)


def checksum(*blocks: bytes | memoryview) -> str:
    """BLAKE2b of some bytes, 32 hex digits."""
    digest = hashlib.blake2b(digest_size=16)
    for block in blocks:
        digest.update(block)
    return digest.hexdigest()


class Shard(Protocol):
    """Some of the documents of a stream, in memory or in files."""

    @property
    def num_tokens(self) -> int:
        """Tokens, separators included."""
        ...

    @property
    def num_documents(self) -> int:
        """Documents that are not empty."""
        ...

    @property
    def num_bytes(self) -> int:
        """Size of the text; 0 if the tokens are not from text."""
        ...

    @property
    def fingerprint(self) -> str:
        """Changes with the content of the arrays."""
        ...

    def read(self, begin: int, end: int) -> TokenArrays:
        """The tokens from index ``begin`` to ``end``.

        Raises:
          TokenCacheError: [T608] a file is damaged.
        """
        ...


@dataclass(frozen=True)
class MemoryShard:
    """A shard whose arrays are in memory.

    Attributes:
      content: The arrays.
      num_bytes: Size of the text; 0 if the tokens are not from text.
    """

    content: TokenArrays
    num_bytes: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens, separators included."""
        return self.content.tokens.size

    @property
    def num_documents(self) -> int:
        """Documents that are not empty."""
        return self.content.starts.size

    @cached_property
    def fingerprint(self) -> str:
        """Changes with the content of the arrays."""
        arrays = (array for array in self.content if array is not None)
        return checksum(*(array.data for array in arrays))

    def read(self, begin: int, end: int) -> TokenArrays:
        """The tokens from index ``begin`` to ``end``."""
        tokens, starts, mask = self.content
        mask = None if mask is None else mask[begin:end]
        return token_range(tokens[begin:end], starts, mask, begin)


class TokenStream:
    """The documents of some shards, one after another.

    Args:
      shards: The shards in order; empty ones are left out.
      is_separated: Whether there is a separator before each document.

    Attributes:
      num_tokens: Tokens of all shards.
      num_documents: Documents of all shards.
      num_bytes: Size of the text; 0 if the tokens are not from text.
      begins: The index at which each shard begins, and the end of the last.
    """

    def __init__(self, shards: Iterable[Shard], *, is_separated: bool) -> None:
        self.shards = [shard for shard in shards if shard.num_tokens]
        self.is_separated = is_separated
        sizes = [0, *(shard.num_tokens for shard in self.shards)]
        self.begins = np.cumsum(np.array(sizes, np.int64))
        self.num_tokens = int(self.begins[-1])
        self.num_documents = sum(shard.num_documents for shard in self.shards)
        self.num_bytes = sum(shard.num_bytes for shard in self.shards)

    @cached_property
    def fingerprint(self) -> str:
        """A fingerprint of all tokens, from those of the shards; 16 hex digits."""
        parts = [repr(self.is_separated), *(shard.fingerprint for shard in self.shards)]
        return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()

    def read(self, begin: int, end: int) -> TokenArrays:
        """The tokens from index ``begin`` to ``end``, or to the end of the stream.

        Raises:
          TokenCacheError: [T608] a shard is damaged.
        """
        end = min(end, int(self.begins[-1]))
        first = int(np.searchsorted(self.begins, begin, side="right")) - 1
        tokens = np.empty(max(end - begin, 0), np.int32)
        starts = [np.empty(0, np.int64)]
        loss_mask = None
        for shard, at in zip(self.shards[first:], self.begins[first:], strict=False):
            if at >= end:
                break
            low = max(begin - int(at), 0)
            part = shard.read(low, min(end - int(at), shard.num_tokens))
            here = slice(offset := int(at) + low - begin, offset + part.tokens.size)
            tokens[here] = part.tokens
            starts.append(part.starts + offset)
            if part.loss_mask is not None:
                if loss_mask is None:
                    loss_mask = np.ones(tokens.size, bool)
                loss_mask[here] = part.loss_mask
        return TokenArrays(tokens, np.concatenate(starts), loss_mask)

    def document_starts(self) -> npt.NDArray[np.int64]:
        """The index at which each document starts, [documents]; reads all shards.

        Raises:
          TokenCacheError: [T608] a shard is damaged.
        """
        starts = [np.empty(0, np.int64)]
        for shard, at in zip(self.shards, self.begins, strict=False):
            starts.append(shard.read(0, shard.num_tokens).starts + at)
        return np.concatenate(starts)


class ShardBuilder:
    """Collects the documents of one shard; empty ones are left out.

    Args:
      separator: The id to insert before each document, or None.
      vocab_size: Ids are below this: the tokenizer's vocabulary, which decides the
        type of the tokens.

    Attributes:
      num_tokens: Tokens so far, separators included.
      num_bytes: Size of the text so far.
    """

    def __init__(self, separator: int | None, vocab_size: int) -> None:
        dtype = np.uint16 if vocab_size <= 2**16 else np.uint32
        self._separator = np.array([] if separator is None else [separator], dtype)
        self._pieces = [self._separator[:0]]
        self._starts: list[int] = []
        self._masks: list[tuple[int, LossMask]] = []
        self.num_tokens = self.num_bytes = 0

    def add(
        self, ids: Ids, loss_mask: LossMask | None = None, num_bytes: int = 0
    ) -> None:
        """Append a document.

        Args:
          ids: Its tokens, [tokens].
          loss_mask: Which of them are learned, [tokens], or None for all. The separator
            before a document with a mask is not learned.
          num_bytes: Size of its text.
        """
        self.num_bytes += num_bytes
        if not ids.size:
            return
        self._starts.append(self.num_tokens)
        self._pieces += [self._separator, ids.astype(self._separator.dtype)]
        if loss_mask is not None:
            learned = np.concatenate([np.zeros(self._separator.size, bool), loss_mask])
            self._masks.append((self.num_tokens, learned))
        self.num_tokens += self._separator.size + ids.size

    def arrays(self) -> TokenArrays:
        """All documents."""
        learned = None
        if self._masks:
            learned = np.ones(self.num_tokens, bool)
            for begin, mask in self._masks:
                learned[begin : begin + mask.size] = mask
        starts = np.array(self._starts, np.int64)
        return TokenArrays(np.concatenate(self._pieces), starts, learned)


def join(
    documents: Iterable[tuple[Ids, LossMask | None]],
    *,
    separator: int | None,
    vocab_size: int,
) -> TokenStream:
    """Concatenate documents in memory into one stream, without empty ones.

    Args:
      documents: Ids, int32 [tokens], and which of them are learned, or None for all.
      separator: The id to insert before each document, or None.
      vocab_size: Ids are in [0, vocab_size).

    Example:
      >>> words = [(np.array([1, 2]), None), (np.array([3]), None)]
      >>> stream = join(words, separator=0, vocab_size=4)
      >>> [values.tolist() for values in stream.read(0, 9)[:2]]
      [[0, 1, 2, 0, 3], [0, 3]]
    """
    builder = ShardBuilder(separator, vocab_size)
    for ids, loss_mask in documents:
        builder.add(ids, loss_mask)
    return TokenStream(
        [MemoryShard(builder.arrays())], is_separated=separator is not None
    )


class PackedRows:
    """The rows of a stream, created on access.

    Args:
      stream: The tokens.
      sequence_length: S, the number of positions in a row.
      keep_tail: Whether to pad and keep an incomplete last row.

    Attributes:
      arrays: Others that rows have, see ``with_arrays``.
    """

    def __init__(
        self, stream: TokenStream, sequence_length: int, *, keep_tail: bool
    ) -> None:
        self.stream = stream
        self.sequence_length = sequence_length
        num_targets = max(stream.num_tokens - 1, 0)
        self._length = num_targets // sequence_length
        if keep_tail and num_targets % sequence_length:
            self._length += 1
        self.arrays: dict[str, npt.NDArray[np.float32]] = {}
        # What decides, beside the sizes, which tokens a row has.
        self._layout: Sequence[npt.NDArray[np.int64]] = ()

    def with_arrays(self, **arrays: npt.NDArray[np.float32]) -> Self:
        """The same rows, which have other arrays, too: of row r the r-th row of each.

        Args:
          arrays: By the name that a row gives them, [rows, S].
        """
        rows = copy(self)
        rows.arrays = arrays
        return rows

    @cached_property
    def fingerprint(self) -> str:
        """Changes with what any row is made of, and with their order; 32 hex digits."""
        sizes = self.stream.fingerprint, self.sequence_length, len(self)
        return checksum(repr(sizes).encode(), *(a.tobytes() for a in self._layout))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Batch:
        """One row: ``tokens``, ``targets``, ``segment_ids``, ``positions``, int32 [S].

        Segments count from 1 in each row, positions from 0 in each segment. After the
        end of the stream, targets are -100 and the rest is 0.

        Raises:
          TokenCacheError: [T608] a shard is damaged.
        """
        window = self._window(index)
        cuts = window.starts[window.starts > 0]
        targets = window.tokens[1:].copy()
        if not self.stream.is_separated:
            # The next token belongs to another text and cannot be predicted.
            targets[cuts - 1] = IGNORE_INDEX
        if window.loss_mask is not None:
            targets[~window.loss_mask[1:]] = IGNORE_INDEX
        offsets = np.arange(targets.size, dtype=np.int32)
        is_start = np.zeros_like(offsets)
        is_start[cuts[cuts < targets.size]] = 1
        row = {
            "tokens": window.tokens[:-1],
            "targets": targets,
            "segment_ids": np.cumsum(is_start, dtype=np.int32) + np.int32(1),
            "positions": offsets - np.maximum.accumulate(is_start * offsets),
        }
        padded = self.padding()
        for name, values in row.items():
            padded[name][: values.size] = values
        return padded | {name: array[index] for name, array in self.arrays.items()}

    def _window(self, index: int) -> TokenArrays:
        """What a row is of: its tokens and the target of its last."""
        begin = index * self.sequence_length
        return self.stream.read(begin, begin + self.sequence_length + 1)

    def padding(self) -> Batch:
        """A row of padding: all targets -100, the rest 0."""
        names = ("tokens", "segment_ids", "positions")
        row = {name: np.zeros(self.sequence_length, np.int32) for name in names}
        row["targets"] = np.full(self.sequence_length, IGNORE_INDEX, np.int32)
        zeros = np.zeros(self.sequence_length, np.float32)
        return row | dict.fromkeys(self.arrays, zeros)
