# SPDX-License-Identifier: Apache-2.0
"""Loads the data of a run: from settings to batches.

DataConfig -> documents (train, validation) -> ids -> TokenStream -> rows -> batches
"""

import hashlib
import platform
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil
from typing import TypeAlias

from tessera.errors import EmptyDataError, SettingValueError
from tessera.training.data.bad_records import BadRecords
from tessera.training.data.batches import (
    Share,
    order_fingerprint,
    train_batches,
    validation_batches,
)
from tessera.training.data.data_config import DataConfig, check
from tessera.training.data.encoding import Encoder
from tessera.training.data.files import units_of
from tessera.training.data.packing import (
    Batch,
    LossMask,
    PackedRows,
    TokenStream,
    join,
)
from tessera.training.data.records import read_records
from tessera.training.data.synthetic import SyntheticTokenizer, make_documents
from tessera.training.data.tokenization import Ids, Tokenizer
from tessera.training.data.units import Unit
from tessera.training.data.vocabulary import check_vocabulary


@dataclass(frozen=True)
class Split:
    """The training or validation part of a corpus."""

    rows: PackedRows

    @cached_property
    def fingerprint(self) -> str:
        """A fingerprint of the tokens and document starts, 16 hex digits."""
        stream, digest = self.rows.stream, hashlib.blake2b(digest_size=8)
        digest.update(stream.tokens.data)
        digest.update(stream.starts.data)
        digest.update(f"{stream.tokens.dtype} {stream.is_separated}".encode())
        return digest.hexdigest()

    def __str__(self) -> str:
        stream, length = self.rows.stream, self.rows.sequence_length
        size = f"{stream.num_bytes:,} bytes, " if stream.num_bytes else ""
        return (
            f"{stream.starts.size:,} documents, {size}{stream.tokens.size:,} tokens, "
            f"{len(self.rows):,} rows of {length:,}"
        )


@dataclass(frozen=True)
class Corpus:
    """Tokenized text in memory, from which batches are drawn; made by ``load``.

    Batches are dicts of int32 arrays [rows, sequence_length]: ``tokens``; ``targets``,
    the next token, or -100 if there is none; ``segment_ids``, which count the documents
    of a row from 1 and are 0 in padding; ``positions``, from 0 in each segment.
    ``docs/guides/data.md`` defines them exactly.

    Attributes:
      title: Name of the data in the log.
      tokenizer: Tokenizer of the text.
      train_split: The rows for training.
      validation_split: The rows for validation.
      seed: Seed of the training order.
      prefetch: Number of batches to prepare ahead.
      num_unused_ids: Ids of the tokenizer outside of the model's vocabulary; none
        occurs in the text.
      bad_records: The records that were left out.
    """

    title: str
    tokenizer: Tokenizer
    train_split: Split
    validation_split: Split
    seed: int
    prefetch: int
    num_unused_ids: int = 0
    bad_records: BadRecords = field(default_factory=BadRecords)

    def train(
        self,
        batch_size: int,
        process_index: int = 0,
        process_count: int = 1,
        start_row: int = 0,
        *,
        microbatches: int = 1,
    ) -> Generator[Batch, None, None]:
        """Endless shuffled batches, prepared ahead in a thread.

        The order of rows depends only on the corpus and its seed. Any number of
        processes reads the same global batches, each its own part of them, and
        ``start_row=n`` continues after n rows, with any batch size.

        Args:
          batch_size: Rows of the global batch.
          process_index: This process.
          process_count: How many processes share each batch; divides ``batch_size``.
          start_row: Number of rows of the order to skip.
          microbatches: Each batch is this many smaller ones in sequence, and a process
            reads its part of each.

        Returns:
          Batches of ``batch_size / process_count`` rows. ``close()`` ends the thread.

        Raises:
          EmptyDataError: [T602] there are fewer rows than ``batch_size``.
          BatchSizeError: [T503] ``process_count`` does not divide ``batch_size``.
        """
        share = Share(batch_size, process_index, process_count, microbatches)
        rows = self.train_split.rows
        if len(rows) < batch_size:
            raise _too_small(rows, batch_size)
        return train_batches(
            rows, share, seed=self.seed, start_row=start_row, prefetch=self.prefetch
        )

    def validation(
        self, batch_size: int, process_index: int = 0, process_count: int = 1
    ) -> Generator[Batch, None, None]:
        """Every validation row once, in an order that does not depend on the seed.

        The order is shuffled, so the first batches are a sample of all files.

        Args:
          batch_size: Rows of the global batch.
          process_index: This process.
          process_count: How many processes share each batch; divides ``batch_size``.

        Returns:
          Batches of ``batch_size / process_count`` rows; the last is padded with rows
          whose targets are all -100. Every process has the same number of batches;
          none if ``validation_fraction`` is 0.

        Raises:
          BatchSizeError: [T503] ``process_count`` does not divide ``batch_size``.
        """
        share = Share(batch_size, process_index, process_count)
        return validation_batches(
            self.validation_split.rows, share, prefetch=self.prefetch
        )

    @cached_property
    def fingerprint(self) -> str:
        """A fingerprint of all batches, 16 hex digits."""
        length = self.train_split.rows.sequence_length
        sides = self.train_split.fingerprint, self.validation_split.fingerprint
        text = f"{sides} {length} {self.seed}"
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    @cached_property
    def order(self) -> Mapping[str, str | int]:
        """Everything that determines the order of training rows, for cursors."""
        rows, tokenizer = self.train_split.rows, self.tokenizer
        return {
            "text": self.train_split.fingerprint,
            "tokenizer": f"{tokenizer.kind}, {tokenizer.vocab_size} ids",
            "sequence_length": rows.sequence_length,
            "rows": len(rows),
            "seed": self.seed,
            "shuffle": order_fingerprint(len(rows), self.seed),
        }

    def describe(self) -> str:
        """A few lines for the log: the source, the tokenizer, the two splits."""
        separator = self.tokenizer.separator
        between = "no separator" if separator is None else f"separator {separator}"
        unused = f", {self.num_unused_ids:,} of them not in the model's vocabulary"
        bad = str(self.bad_records).replace("\n", "\n            ")
        return "\n".join(
            (
                f"data        {self.title}",
                *([f"left out    {bad}"] if self.bad_records.counts else []),
                f"tokenizer   {self.tokenizer.kind}, {self.tokenizer.vocab_size:,} ids"
                f"{unused if self.num_unused_ids else ''}, {between}",
                f"train       {self.train_split}",
                f"validation  {self.validation_split}",
                f"fingerprint {self.fingerprint}",
            )
        )


def load(
    config: DataConfig, *, sequence_length: int, seed: int, vocab_size: int
) -> Corpus:
    """Read, tokenize and pack the data of a configuration.

    Args:
      config: The settings.
      sequence_length: Positions in a row.
      seed: Determines the training order, and the tokens of ``synthetic``.
      vocab_size: The model's vocabulary size.

    Raises:
      DataNotFoundError: [T601] a path does not exist or cannot be read.
      EmptyDataError: [T602] there is no text, or a file is not text.
      VocabularyError: [T603] the tokenizer adds ids to every text that the model does
        not have.
      TokenRangeError: [T604] a text has a token that the model does not have.
      TokenizerError: [T605] the tokenizer does not exist or cannot be read.
      DataFormatError: [T606] a file is not text.
      BadRecordError: [T607] records have no text, more than ``max_bad_records``.
      SettingValueError: [T502] a setting is out of range or would be ignored.
      SettingConflictError: [T507] ``text_key`` is given, and no file has keys.

    Example:
      >>> corpus = load(DataConfig(), sequence_length=64, seed=0, vocab_size=257)
      >>> batch = next(corpus.train(8))
      >>> {array.shape for array in batch.values()}, sorted(batch)
      ({(8, 64)}, ['positions', 'segment_ids', 'targets', 'tokens'])
    """
    check(config)
    if sequence_length < 1:
        raise SettingValueError(
            "the sequence length is out of range",
            got=f"{sequence_length}",
            fix="use a value of at least 1",
        )
    make = _make_synthetic if config.name == "synthetic" else _read_text
    title, tokenizer, train, validation, bad_records = make(config, seed, vocab_size)
    _check_text(title, train, validation, config.validation_fraction)
    return Corpus(
        title=title,
        tokenizer=tokenizer,
        train_split=Split(PackedRows(train, sequence_length, keep_tail=False)),
        validation_split=Split(PackedRows(validation, sequence_length, keep_tail=True)),
        seed=seed,
        prefetch=config.prefetch,
        num_unused_ids=max(tokenizer.vocab_size - vocab_size, 0),
        bad_records=bad_records,
    )


# Title, tokenizer, training stream, validation stream and the records left out.
_Source: TypeAlias = tuple[str, Tokenizer, TokenStream, TokenStream, BadRecords]


def _read_text(config: DataConfig, seed: int, vocab_size: int) -> _Source:
    del seed  # only synthetic data depends on it
    title = f"text at {config.path!r}"
    if config.name == "stdlib":
        title = f"standard library of Python {platform.python_version()}"
    encoder = Encoder(config, vocab_size)
    bad_records = BadRecords(config.max_bad_records)
    train, validation = (
        _tokenize(config, units, encoder, vocab_size, bad_records)
        for units in units_of(config)
    )
    return title, encoder.tokenizer, train, validation, bad_records


def _tokenize(
    config: DataConfig,
    units: Sequence[Unit],
    encoder: Encoder,
    vocab_size: int,
    bad_records: BadRecords,
) -> TokenStream:
    sizes: list[int] = []

    def encode() -> Iterator[tuple[str, Ids, LossMask | None]]:
        for unit in units:
            for record in read_records(unit, config, bad_records):
                if encoded := encoder.encode(record, bad_records):
                    sizes.append(encoded.num_bytes)
                    yield unit.name, encoded.ids, encoded.loss_mask

    stream = join(encode(), separator=encoder.separator, vocab_size=vocab_size)
    return replace(stream, num_bytes=sum(sizes))


def _make_synthetic(config: DataConfig, seed: int, vocab_size: int) -> _Source:
    tokenizer = SyntheticTokenizer(config.synthetic.vocab_size or vocab_size)
    check_vocabulary(tokenizer, vocab_size)
    documents = make_documents(config.synthetic, tokenizer.vocab_size, seed)
    cut = len(documents) - ceil(len(documents) * config.validation_fraction)
    train, validation = (
        join(
            ((*one, None) for one in part),
            separator=tokenizer.separator,
            vocab_size=vocab_size,
        )
        for part in (documents[:cut], documents[cut:])
    )
    return "synthetic patterns", tokenizer, train, validation, BadRecords()


def _check_text(
    title: str, train: TokenStream, validation: TokenStream, fraction: float
) -> None:
    if not train.tokens.size and not validation.tokens.size:
        raise EmptyDataError(
            f"there is no text in the data: {title}",
            got="every document is empty",
            fix="set data.path to files with text",
        )
    if fraction and not validation.tokens.size:
        raise EmptyDataError(
            f"no text is left for validation: {title}",
            got=f"data.validation_fraction={fraction} of {train.tokens.size:,} tokens",
            fix="raise data.validation_fraction, or use 0 for no validation",
        )


def _too_small(rows: PackedRows, batch_size: int) -> EmptyDataError:
    tokens, length = rows.stream.tokens.size, rows.sequence_length
    fixes = [f"a batch of at most {len(rows)} rows"] if len(rows) else []
    if longest := max(tokens - 1, 0) // batch_size:
        fixes.append(f"a sequence length of at most {longest}")
    return EmptyDataError(
        "the training data is smaller than one batch",
        got=f"{tokens:,} tokens / sequence length {length:,} = {len(rows):,} rows, "
        f"and a batch takes {batch_size:,}",
        fix="use " + ", or ".join([*fixes, "more text"]),
    )
