# SPDX-License-Identifier: Apache-2.0
"""Turns records into token ids, with a mask of the tokens that are learned."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tessera.errors import EmptyDataError, TokenizerError, TokenRangeError
from tessera.training.data.bad_records import BadRecords
from tessera.training.data.data_config import DataConfig
from tessera.training.data.records import Record
from tessera.training.data.tokenization import Ids, load_tokenizer
from tessera.training.data.vocabulary import (
    check_separator,
    check_tokens,
    out_of_vocabulary,
)

# Characters that are encoded at a time: enough to make calls cheap.
_BATCH_SIZE: Final = 2**20


class Encoded(NamedTuple):
    """A document as tokens.

    Attributes:
      ids: Without a separator, [tokens].
      loss_mask: Which of these tokens are learned, [tokens]: the target of the position
        before each of the others is -100. None means all of them.
      num_bytes: Size of the text.
    """

    ids: Ids
    loss_mask: npt.NDArray[np.bool_] | None
    num_bytes: int


class Encoder:
    """The tokenizer of a run.

    Args:
      config: The settings ``tokenizer`` and ``max_bad_records``.
      vocab_size: The model's vocabulary size.

    Attributes:
      tokenizer: The tokenizer.
      separator: The id before every document, or None.

    Raises:
      TokenizerError: [T605] the tokenizer does not exist or cannot be read.
      VocabularyError: [T603] the model does not have the separator.
    """

    def __init__(self, config: DataConfig, vocab_size: int) -> None:
        self.tokenizer = load_tokenizer(config.tokenizer)
        self.separator = self.tokenizer.separator
        self._vocab_size = vocab_size
        check_separator(self.tokenizer, vocab_size)

    def encode(self, record: Record, bad_records: BadRecords) -> Encoded | None:
        """The tokens of a record; None if it cannot be used.

        Args:
          record: The record.
          bad_records: Counts the records that are skipped.

        Raises:
          EmptyDataError: [T602] it is not UTF-8, and the tokenizer needs that.
          TokenRangeError: [T604] it has a token that the model does not have.
          TokenizerError: [T605] the tokenizer has no ids for it.
          BadRecordError: [T607] too many records cannot be used.
        """
        try:
            ids = self.tokenizer.encode(record.text)
        except UnicodeDecodeError as error:
            bad_records.skip("not UTF-8", _not_utf8(record, error))
            return None
        content = record.text
        if out_of_vocabulary(ids, self._vocab_size).size:
            check_tokens(
                record.name,
                content,
                ids,
                self.tokenizer,
                self._vocab_size,
                first_line=record.first_line,
            )
        return Encoded(ids, None, _size(record))

    def encode_all(
        self, records: Iterable[Record], bad_records: BadRecords
    ) -> Iterator[Encoded]:
        """The tokens of records, some of which are in memory at a time.

        Raises:
          TesseraError: As ``encode``.
        """
        for batch in _batches(records):
            try:
                encoded = self._encode_batch(batch)
            except (UnicodeDecodeError, TokenizerError, TokenRangeError):
                # One by one, to skip or to name the records that cannot be used.
                each = (self.encode(record, bad_records) for record in batch)
                encoded = [one for one in each if one is not None]
            yield from encoded

    def _encode_batch(self, records: Sequence[Record]) -> list[Encoded]:
        ids = self.tokenizer.encode_batch([record.text for record in records])
        if any(out_of_vocabulary(each, self._vocab_size).size for each in ids):
            raise TokenRangeError(
                "some record has a token that the model does not have"
            )
        return [
            Encoded(each, None, _size(record))
            for each, record in zip(ids, records, strict=True)
        ]


def _batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    batch: list[Record] = []
    size = 0
    for record in records:
        batch.append(record)
        size += len(record.text)
        if size >= _BATCH_SIZE:
            yield batch
            batch = list[Record]()
            size = 0
    if batch:
        yield batch


def _size(record: Record) -> int:
    text = record.text
    return len(text.encode() if isinstance(text, str) else text)


def _not_utf8(record: Record, error: UnicodeDecodeError) -> EmptyDataError:
    return EmptyDataError(
        f"the data file {record.unit.name!r} is not UTF-8 text",
        got=f"{record.unit.path}: byte 0x{error.object[error.start]:02x} at "
        f"offset {record.offset + error.start}",
        fix="convert the file to UTF-8, leave it out, or use data.tokenizer=bytes, "
        "which accepts any file",
    )
