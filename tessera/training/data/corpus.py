# SPDX-License-Identifier: Apache-2.0
"""Loads the data of a run: from settings to batches.

DataConfig -> documents (train, validation) -> ids -> TokenStream -> rows -> batches
"""

import hashlib
import platform
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import TypeAlias

from tessera.errors import EmptyDataError, SettingConflictError, SettingValueError
from tessera.training.data.batches import (
    Share,
    order_fingerprint,
    train_batches,
    validation_batches,
)
from tessera.training.data.data_config import DataConfig, check
from tessera.training.data.documents import Document, list_files, list_stdlib, split
from tessera.training.data.formats import JSON_LINES, format_of, texts_of
from tessera.training.data.packing import Batch, PackedRows, TokenStream, join
from tessera.training.data.synthetic import SyntheticTokenizer, make_documents
from tessera.training.data.tokenization import (
    Ids,
    Tokenizer,
    check_separator,
    check_tokens,
    check_vocabulary,
    load_tokenizer,
)


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
    """

    title: str
    tokenizer: Tokenizer
    train_split: Split
    validation_split: Split
    seed: int
    prefetch: int
    num_unused_ids: int = 0

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
        return "\n".join(
            (
                f"data        {self.title}",
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
      JsonLinesError: [T607] a line of JSON lines has no text.
      SettingValueError: [T502] a setting is out of range or would be ignored.
      SettingConflictError: [T507] ``text_field`` is given, and no file has fields.

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
    title, tokenizer, train, validation = make(config, seed, vocab_size)
    _check_text(title, train, validation, config.validation_fraction)
    return Corpus(
        title=title,
        tokenizer=tokenizer,
        train_split=Split(PackedRows(train, sequence_length, keep_tail=False)),
        validation_split=Split(PackedRows(validation, sequence_length, keep_tail=True)),
        seed=seed,
        prefetch=config.prefetch,
        num_unused_ids=max(tokenizer.vocab_size - vocab_size, 0),
    )


# Title, tokenizer, training stream and validation stream.
_Source: TypeAlias = tuple[str, Tokenizer, TokenStream, TokenStream]


def _read_text(config: DataConfig, seed: int, vocab_size: int) -> _Source:
    del seed  # only synthetic data depends on it
    tokenizer = load_tokenizer(config.tokenizer)
    check_separator(tokenizer, vocab_size)
    if config.name == "stdlib":
        title = f"standard library of Python {platform.python_version()}"
        documents = list_stdlib()
    else:
        title, documents = f"text at {config.path!r}", list_files(config.path)
    formats = {format_of(document, config.format) for document in documents}
    if JSON_LINES not in formats:
        _check_no_field(config)
    train, validation = split(
        documents, config.validation_fraction, by_lines=JSON_LINES in formats
    )
    return (
        title,
        tokenizer,
        _tokenize(config, train, tokenizer, vocab_size),
        _tokenize(config, validation, tokenizer, vocab_size),
    )


def _tokenize(
    config: DataConfig,
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    vocab_size: int,
) -> TokenStream:
    sizes: list[int] = []

    def encode() -> Iterator[tuple[str, Ids]]:
        for document in documents:
            for name, content in texts_of(document, config.format, config.text_field):
                sizes.append(len(content))
                try:
                    ids = tokenizer.encode(content)
                except UnicodeDecodeError as error:
                    raise _not_text(document, content, error) from error
                line = document.first_line if name == document.name else 1
                check_tokens(name, content, ids, tokenizer, vocab_size, first_line=line)
                yield name, ids

    stream = join(encode(), separator=tokenizer.separator, vocab_size=vocab_size)
    return replace(stream, num_bytes=sum(sizes))


def _make_synthetic(config: DataConfig, seed: int, vocab_size: int) -> _Source:
    tokenizer = SyntheticTokenizer(config.synthetic.vocab_size or vocab_size)
    check_vocabulary(tokenizer, vocab_size)
    documents = make_documents(config.synthetic, tokenizer.vocab_size, seed)
    cut = len(documents) - ceil(len(documents) * config.validation_fraction)
    train, validation = (
        join(part, separator=tokenizer.separator, vocab_size=vocab_size)
        for part in (documents[:cut], documents[cut:])
    )
    return "synthetic patterns", tokenizer, train, validation


def _check_no_field(config: DataConfig) -> None:
    if config.text_field != DataConfig.text_field:
        raise SettingConflictError(
            "data.text_field has no effect in this run",
            got=f"data.text_field={config.text_field}, and no file of {config.path!r} "
            "is read as JSON lines",
            fix="leave it out, or use data.format=jsonl",
        )


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


def _not_text(
    document: Document, content: bytes, error: UnicodeDecodeError
) -> EmptyDataError:
    return EmptyDataError(
        f"the data file {document.name!r} is not UTF-8 text",
        got=f"{document.path}: byte 0x{content[error.start]:02x} at "
        f"offset {document.begin + error.start}",
        fix="convert the file to UTF-8, leave it out, or use data.tokenizer=bytes, "
        "which accepts any file",
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
