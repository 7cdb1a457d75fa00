# SPDX-License-Identifier: Apache-2.0
"""The way of the data, from its settings to batches.

DataConfig -> documents (train, validation) -> ids -> TokenStream -> rows -> batches
"""

import hashlib
import platform
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import NamedTuple

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
from tessera.training.data.tokenization import Ids, Tokenizer, load_tokenizer
from tessera.training.data.vocabulary import (
    check_separator,
    check_tokens,
    check_vocabulary,
)


@dataclass(frozen=True)
class Split:
    """One side of the corpus: its rows, and what they were made from."""

    rows: PackedRows
    num_bytes: int

    @cached_property
    def fingerprint(self) -> str:
        """Sixteen hex digits of the tokens, and of where documents begin."""
        stream, digest = self.rows.stream, hashlib.blake2b(digest_size=8)
        digest.update(stream.tokens.data)
        digest.update(stream.starts.data)
        digest.update(f"{stream.tokens.dtype} {stream.is_separated}".encode())
        return digest.hexdigest()

    def __str__(self) -> str:
        stream, length = self.rows.stream, self.rows.sequence_length
        size = f"{self.num_bytes:,} bytes, " if self.num_bytes else ""
        return (
            f"{stream.starts.size:,} documents, {size}{stream.tokens.size:,} tokens, "
            f"{len(self.rows):,} rows of {length:,}"
        )


@dataclass(frozen=True)
class Corpus:
    """Tokenized text in memory, ready to be drawn from. Made by ``load``.

    Batches are dicts of int32 arrays [rows, sequence_length]: ``tokens``; ``targets``,
    the next token, or -100 where there is none; ``segment_ids``, which count the
    documents of a row from 1 and are 0 in padding; ``positions``, from 0 in each
    segment. ``docs/guides/data.md`` defines them exactly.

    Attributes:
      title: What the log calls the data.
      tokenizer: Of its text.
      train_split: What training reads.
      validation_split: What is kept for validation.
      seed: Of the order of training.
      prefetch: Batches to make ahead.
      num_beyond: Ids of the tokenizer that the model has no row for; none is in the
        text.
    """

    title: str
    tokenizer: Tokenizer
    train_split: Split
    validation_split: Split
    seed: int
    prefetch: int
    num_beyond: int = 0

    def train(
        self,
        batch_size: int,
        process_index: int = 0,
        process_count: int = 1,
        start_row: int = 0,
        *,
        microbatches: int = 1,
    ) -> Generator[Batch, None, None]:
        """Shuffled batches without end, made ahead in a thread.

        The order of the rows depends on the corpus and its seed alone. Any number of
        processes reads the same global batches, each its own part of them, and
        ``start_row=n`` goes on where n rows were read, in batches of whatever size.

        Args:
          batch_size: Rows of the global batch.
          process_index: This process.
          process_count: How many processes share each batch; divides ``batch_size``.
          start_row: How many rows of the order to pass over.
          microbatches: Each batch is so many smaller ones in a row, of which a
            process reads its part one after the other.

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
        """Every validation row once, in an order that no seed changes.

        The order is shuffled: the first batches are a fair sample of all files.

        Args:
          batch_size: Rows of the global batch.
          process_index: This process.
          process_count: How many processes share each batch; divides ``batch_size``.

        Returns:
          Batches of ``batch_size / process_count`` rows; the last is filled up with
          rows whose targets are all -100. As many on every process; none where
          ``validation_fraction`` is 0.

        Raises:
          BatchSizeError: [T503] ``process_count`` does not divide ``batch_size``.
        """
        share = Share(batch_size, process_index, process_count)
        return validation_batches(
            self.validation_split.rows, share, prefetch=self.prefetch
        )

    @cached_property
    def fingerprint(self) -> str:
        """Sixteen hex digits that change when any batch would."""
        length = self.train_split.rows.sequence_length
        sides = self.train_split.fingerprint, self.validation_split.fingerprint
        said = f"{sides} {length} {self.seed}"
        return hashlib.blake2b(said.encode(), digest_size=8).hexdigest()

    @cached_property
    def order(self) -> Mapping[str, str | int]:
        """What decides which row training reads when; a cursor is of one order."""
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
        unused = f", {self.num_beyond:,} ids beyond the model's and in no text"
        return "\n".join(
            (
                f"data        {self.title}",
                f"tokenizer   {self.tokenizer.kind}, {self.tokenizer.vocab_size:,} ids,"
                f" {between}{unused if self.num_beyond else ''}",
                f"train       {self.train_split}",
                f"validation  {self.validation_split}",
                f"fingerprint {self.fingerprint}",
            )
        )


def load(
    config: DataConfig, *, sequence_length: int, seed: int, vocab_size: int
) -> Corpus:
    """Read, tokenize and pack the data that ``config`` names.

    Args:
      config: The settings.
      sequence_length: Positions in a row.
      seed: Decides the order of training, and the tokens of ``synthetic``.
      vocab_size: The model's.

    Raises:
      DataNotFoundError: [T601] a path does not exist or cannot be read.
      EmptyDataError: [T602] there is no text, or a file is not text.
      VocabularyError: [T603] the tokenizer puts ids into every text that the model
        does not have.
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
        train_split=Split(
            PackedRows(train.stream, sequence_length, keep_tail=False), train.num_bytes
        ),
        validation_split=Split(
            PackedRows(validation.stream, sequence_length, keep_tail=True),
            validation.num_bytes,
        ),
        seed=seed,
        prefetch=config.prefetch,
        num_beyond=max(tokenizer.vocab_size - vocab_size, 0),
    )


class _Side(NamedTuple):
    stream: TokenStream
    num_bytes: int


_Source = tuple[str, Tokenizer, _Side, _Side]


def _read_text(config: DataConfig, seed: int, vocab_size: int) -> _Source:
    del seed  # text is what it is
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
) -> _Side:
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
    return _Side(stream, sum(sizes))


def _make_synthetic(config: DataConfig, seed: int, vocab_size: int) -> _Source:
    tokenizer = SyntheticTokenizer(config.synthetic.vocab_size or vocab_size)
    check_vocabulary(tokenizer, vocab_size)
    documents = make_documents(config.synthetic, tokenizer.vocab_size, seed)
    cut = len(documents) - ceil(len(documents) * config.validation_fraction)
    train, validation = (
        _Side(join(part, separator=tokenizer.separator, vocab_size=vocab_size), 0)
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


def _check_text(title: str, train: _Side, validation: _Side, fraction: float) -> None:
    if not train.stream.tokens.size and not validation.stream.tokens.size:
        raise EmptyDataError(
            f"there is no text in the data: {title}",
            got="every document is empty",
            fix="give data.path files that hold text",
        )
    if fraction and not validation.stream.tokens.size:
        raise EmptyDataError(
            f"no text is left for validation: {title}",
            got=f"data.validation_fraction={fraction} of "
            f"{train.stream.tokens.size:,} tokens",
            fix="raise data.validation_fraction, or use 0 to do without validation",
        )


def _not_text(
    document: Document, content: bytes, error: UnicodeDecodeError
) -> EmptyDataError:
    return EmptyDataError(
        f"the data file {document.name!r} is not UTF-8 text",
        got=f"{document.path}: byte 0x{content[error.start]:02x} at "
        f"offset {document.begin + error.start}",
        fix="convert the file to UTF-8, leave it out, or use data.tokenizer=bytes, "
        "which takes any file",
    )


def _too_small(rows: PackedRows, batch_size: int) -> EmptyDataError:
    tokens, length = rows.stream.tokens.size, rows.sequence_length
    ways = [f"a batch of at most {len(rows)} rows"] if len(rows) else []
    if longest := max(tokens - 1, 0) // batch_size:
        ways.append(f"a sequence length of at most {longest}")
    return EmptyDataError(
        "the training data is smaller than one batch",
        got=f"{tokens:,} tokens / sequence length {length:,} = {len(rows):,} rows, "
        f"and a batch takes {batch_size:,}",
        fix="use " + ", or ".join([*ways, "more text"]),
    )
