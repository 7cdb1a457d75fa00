# SPDX-License-Identifier: Apache-2.0
"""Turns records into token ids, with a mask of the tokens that are learned."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tessera.errors import EmptyDataError
from tessera.training.data.bad_records import BadRecords
from tessera.training.data.data_config import DataConfig
from tessera.training.data.records import Record
from tessera.training.data.tokenization import Ids, load_tokenizer
from tessera.training.data.vocabulary import (
    check_separator,
    check_tokens,
    out_of_vocabulary,
)


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
        size = len(content.encode() if isinstance(content, str) else content)
        return Encoded(ids, None, size)


def _not_utf8(record: Record, error: UnicodeDecodeError) -> EmptyDataError:
    return EmptyDataError(
        f"the data file {record.unit.name!r} is not UTF-8 text",
        got=f"{record.unit.path}: byte 0x{error.object[error.start]:02x} at "
        f"offset {record.offset + error.start}",
        fix="convert the file to UTF-8, leave it out, or use data.tokenizer=bytes, "
        "which accepts any file",
    )
