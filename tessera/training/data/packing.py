# SPDX-License-Identifier: Apache-2.0
"""Packs documents into rows: one token stream, cut every ``sequence_length``.

    documents   [h e y] [y o]                      S = 4, separator |
    stream      | h e y | y o
    row 0       tokens | h e y    targets h e y |    segments 1 1 1 1
    row 1       tokens | y _ _    targets y o _ _    segments 1 1 0 0

Row r reads ``stream[r*S : (r+1)*S + 1]``, so every token of the stream except the first
is the target of exactly one position. The target of a document's last token is the
separator after it, from which a model learns where documents end.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tessera.errors import TokenRangeError
from tessera.labels import IGNORE_INDEX
from tessera.training.data.tokenization import Ids
from tessera.training.data.vocabulary import out_of_vocabulary

Batch = dict[str, npt.NDArray[np.int32]]
LossMask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class TokenStream:
    """Concatenated documents.

    Attributes:
      tokens: uint16 where the vocabulary allows it, else int32; [tokens].
      starts: The index at which each document starts, with its separator; int64,
        [documents].
      is_separated: Whether there is a separator before each document.
      num_bytes: Size of the text; 0 if the tokens are not from text.
      loss_mask: Which tokens are learned: the others are the target of no position.
        None means all of them; [tokens].
    """

    tokens: npt.NDArray[np.uint16 | np.int32]
    starts: npt.NDArray[np.int64]
    is_separated: bool
    num_bytes: int = 0
    loss_mask: LossMask | None = None


def join(
    documents: Iterable[tuple[str, Ids, LossMask | None]],
    *,
    separator: int | None,
    vocab_size: int,
) -> TokenStream:
    """Concatenate documents into one stream, without empty ones.

    Args:
      documents: Names, ids, int32 [tokens], and which of them are learned, or None for
        all; the separator before a document with a mask is not learned.
      separator: The id to insert before each document, or None.
      vocab_size: The model's vocabulary size; ids must be in [0, vocab_size).

    Raises:
      TokenRangeError: [T604] an id is negative or too large; names its document.

    Example:
      >>> words = [("a", np.array([1, 2]), None), ("b", np.array([3]), None)]
      >>> stream = join(words, separator=0, vocab_size=4)
      >>> stream.tokens.tolist(), stream.starts.tolist()
      ([0, 1, 2, 0, 3], [0, 3])
    """
    dtype = np.uint16 if vocab_size <= 2**16 else np.int32
    before = np.array([] if separator is None else [separator], dtype)
    pieces, lengths = [before[:0]], [0]
    masks: list[LossMask] = []
    has_mask = False
    for name, ids, mask in documents:
        if not ids.size:
            continue
        _check_range(name, ids, vocab_size)
        pieces += [before, ids.astype(dtype)]
        lengths.append(before.size + ids.size)
        has_mask |= mask is not None
        learned = np.full(before.size, mask is None)
        masks += [learned, np.ones(ids.size, bool) if mask is None else mask]
    return TokenStream(
        np.concatenate(pieces),
        np.cumsum(np.array(lengths, np.int64))[:-1],
        is_separated=separator is not None,
        loss_mask=np.concatenate(masks) if has_mask else None,
    )


def _check_range(name: str, ids: Ids, vocab_size: int) -> None:
    wrong = out_of_vocabulary(ids, vocab_size)
    if not wrong.size:
        return
    raise TokenRangeError(
        f"document {name!r} has token ids outside the model's vocabulary",
        got=f"id {ids[wrong[0]]} at token {wrong[0]}, {wrong.size} such in all; "
        f"legal ids are 0 to {vocab_size - 1}",
        fix="use the model's own tokenizer, or give the model a larger vocabulary",
    )


class PackedRows:
    """The rows of a stream, created on access.

    Args:
      stream: The tokens.
      sequence_length: S, the number of positions in a row.
      keep_tail: Whether to pad and keep an incomplete last row.
    """

    def __init__(
        self, stream: TokenStream, sequence_length: int, *, keep_tail: bool
    ) -> None:
        self.stream = stream
        self.sequence_length = sequence_length
        num_targets = max(stream.tokens.size - 1, 0)
        self._length = num_targets // sequence_length
        if keep_tail and num_targets % sequence_length:
            self._length += 1

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Batch:
        """One row: ``tokens``, ``targets``, ``segment_ids``, ``positions``, int32 [S].

        Segments count from 1 in each row, positions from 0 in each segment. After the
        end of the stream, targets are -100 and the rest is 0.
        """
        length, begin = self.sequence_length, index * self.sequence_length
        starts = self.stream.starts
        window = self.stream.tokens[begin : begin + length + 1].astype(np.int32)
        inner = slice(*np.searchsorted(starts, (begin + 1, begin + length + 1)))
        cuts = starts[inner] - begin
        targets = window[1:].copy()
        if not self.stream.is_separated:
            # The next token belongs to another text and cannot be predicted.
            targets[cuts - 1] = IGNORE_INDEX
        if self.stream.loss_mask is not None:
            learned = self.stream.loss_mask[begin + 1 : begin + length + 1]
            targets[~learned] = IGNORE_INDEX
        offsets = np.arange(targets.size, dtype=np.int32)
        is_start = np.zeros_like(offsets)
        is_start[cuts[cuts < targets.size]] = 1
        row = {
            "tokens": window[:-1],
            "targets": targets,
            "segment_ids": np.cumsum(is_start, dtype=np.int32) + np.int32(1),
            "positions": offsets - np.maximum.accumulate(is_start * offsets),
        }
        padded = self.padding()
        for name, values in row.items():
            padded[name][: values.size] = values
        return padded

    def padding(self) -> Batch:
        """A row of padding: all targets -100, the rest 0."""
        names = ("tokens", "segment_ids", "positions")
        row = {name: np.zeros(self.sequence_length, np.int32) for name in names}
        row["targets"] = np.full(self.sequence_length, IGNORE_INDEX, np.int32)
        return row
